"""Text of files on its way to a terminal or a log, which obey control characters wherever they come from."""


def printable(text: object) -> str:
    """The text with every character that no one can see as U+FFFD, but for spaces and new lines.

    Escape sequences set a terminal's title, clear its screen or answer in the user's name; marks of direction show a line
    as another one.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in str(text)
    )
