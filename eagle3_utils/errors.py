"""The one exception a user sees: what is wrong, where, and what to do about it."""


def first_line(error: Exception) -> str:
    """What an exception of a library says, cut to one line; its class when it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class UserError(Exception):
    """A user's mistake or a failed check; the command line prints it in one or two lines, without a traceback.

    Parameters
    ----------
    what : what is wrong, in one clause.
    where : file and line, key, host and port: the place to look.
    fix : what to do, as a command or an imperative sentence.
    exit_code : 1 a check failed, 2 the parameters are wrong or the plan does not fit.
    """

    def __init__(self, what: str, where: str | None = None, fix: str | None = None, exit_code: int = 1):
        self.what, self.where, self.fix, self.exit_code = what, where, fix, exit_code
        super().__init__(what, where, fix, exit_code)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}" + (f"\n  {self.fix}" if self.fix else "")
