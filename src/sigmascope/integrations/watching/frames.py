"""What the host raises shows the host's calls alone, also to a program that prints its own tracebacks."""


def without_this_frame(error: BaseException) -> None:
    """Take the frame that has just caught an error out of the error's traceback.

    To be called first in an `except BaseException as error` that ends with a bare `raise`, which adds no frame. Nothing
    else of the error changes.

    Args:
        error: What was caught, whose traceback therefore begins with the frame that caught it.
    """
    trace = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next
