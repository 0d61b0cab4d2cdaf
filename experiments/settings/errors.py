"""What a user is told when a wish cannot be met."""


class UserError(Exception):
    """A wish that cannot be met; its text is one sentence for the user."""


class StorageError(Exception):
    """What a run leaves behind cannot be written; its text is one sentence for the user.

    Attributes:
      full: whether the disk is full, so that it could be written once there is room.
    """

    def __init__(self, sentence: str, full: bool = False) -> None:
        super().__init__(sentence)
        self.full = full


class DivergedError(Exception):
    """A seed diverged and the run was to stop then; its text is one sentence for the user."""


class FailedRunsError(Exception):
    """Some runs of several failed; its text is one sentence for the user."""


class ProcessError(Exception):
    """Another process of the run is gone; its text is one sentence for the user."""
