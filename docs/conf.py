"""How Sphinx builds the pages: ``make docs``. Works offline; a warning is an error."""

import dataclasses
import inspect

from flax import linen as nn
from flax import nnx

import recurrent_gates

project = "recurrent_gates"
author = "the authors of recurrent_gates"
release = recurrent_gates.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "results"]

smartquotes_action = "D"  # dashes alone: a prime is no quotation mark

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

add_module_names = False
autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
toc_object_entries_show_parents = "hide"

_FLAX_OWN = {"name", "parent"}  # fields that Flax adds to modules


def _text(value: object) -> str:
    """A field's default as one would write it; an initializer that has no name is ``...``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [
            f"{field.name}={_text(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(changed)})"
    if callable(value):
        name = getattr(value, "__name__", "init")
        return "..." if name == "init" else name
    return repr(value)


def _signature(app, what, name, value, options, signature, returned):
    """A module's settings in the place of the constructor that Flax generates."""
    if what == "class" and issubclass(value, nnx.Module):  # its metaclass hides it
        written = inspect.signature(value.__init__)
        own = [p.replace(annotation=p.empty) for p in written.parameters.values()][1:]
        return str(inspect.Signature(own)), ""
    if what != "class" or not dataclasses.is_dataclass(value):
        return None
    left_out = _FLAX_OWN if issubclass(value, nn.Module) else set()
    fields = [field for field in dataclasses.fields(value) if field.name not in left_out]
    written = [
        field.name
        if field.default is dataclasses.MISSING
        else f"{field.name}={_text(field.default)}"
        for field in fields
    ]
    return f"({', '.join(written)})", ""


def _skip(app, what, name, value, skip, options):
    """Leaves out what Flax and ``NamedTuple`` add to a class."""
    alias = inspect.isdatadescriptor(value) and "Alias for field" in (inspect.getdoc(value) or "")
    return True if alias or name == "replace" else None


def setup(app):
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)
