"""What a user is told when a wish cannot be met."""


class UserError(Exception):
    """A wish that cannot be met; its text is one sentence for the user."""


class StorageError(Exception):
    """What a run leaves behind cannot be written; its text is one sentence for the user."""


class FailedRunsError(Exception):
    """Some runs of several failed; its text is one sentence for the user."""


class ProcessError(Exception):
    """Another process of the run is gone; its text is one sentence for the user."""
