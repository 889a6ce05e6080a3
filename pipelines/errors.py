"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in flags, files or data, told in one line: what, where, what exists instead.

    Command-line programs print it as ``error: <message>`` and exit with code 1; it never needs a
    stack trace.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(str(message).split()))
