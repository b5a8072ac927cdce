"""Documents of text into samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zeropipe.train.data.reading import Piece, in_blocks
from zeropipe.train.data.tokenizer import Bytes, HuggingFace, require_known
from zeropipe.train.data.writer import Writer


def write_texts(
    pieces: Iterable[Piece], tokenizer: Bytes | HuggingFace, writer: Writer, vocabulary: int, beat: Callable[[], None]
) -> None:
    """Each document is what the tokenizer makes of it, and its end-of-text token."""
    found = 0  # tokens of the current document's text
    require_known("the tokenizer", tokenizer.end, vocabulary, "it ends texts with")
    for batch in in_blocks(pieces):
        for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch])):
            require_known(piece.where, ids, vocabulary, "the tokenizer makes")
            if len(ids) and not found:
                writer.extend(tokenizer.start)
            found += len(ids)
            writer.extend(ids)
            if piece.is_last and found:
                writer.extend(tokenizer.end)
                writer.end_document()
            elif piece.is_last:
                writer.leave_out("empty documents")
            found = 0 if piece.is_last else found
        beat()
