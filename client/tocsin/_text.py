"""Text from outside, made fit to be sent: protobuf takes only what UTF-8 can encode.

A file name that is not UTF-8, as the operating system gives it, holds lone surrogates, and so does
the text of an error about that file. Nothing here raises, whatever it is given.
"""

from __future__ import annotations


def encodable(text: str) -> str:
    """The text, with lone surrogates written as `\\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode()


def text_of(value: object) -> str:
    """`str(value)`, fit to be sent, or a note in its place if that raises."""
    try:
        return encodable(str(value))
    except BaseException as error:  # code of the user's, which may raise anything
        return encodable(
            f"(no text: str() of {type(value).__qualname__} raised {type(error).__qualname__})"
        )
