"""Token ids as text, one piece a token, from a tokenizer.json.

Contract: the pieces of a list of ids, put together, are the text that the ids decode to. A character whose bytes are
spread over several tokens belongs to the last of them; the ones before it are empty.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any

from retool.paths import why_not_found
from view.load import FileError


class Vocabulary:
    """Pieces of ids, each looked up once."""

    def __init__(self, folder: Path):
        """`folder` holds tokenizer.json, as every model's folder does. FileError if it cannot be used."""
        file = folder / "tokenizer.json" if os.path.isdir(folder) else folder
        if not os.path.isfile(file):
            raise FileError(f"cannot read the tokenizer {file}: {why_not_found(file)}")
        try:
            from tokenizers import Tokenizer

            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except ImportError as error:
            raise FileError("--tokenizer needs the package tokenizers: pip install tokenizers") from error
        except Exception as error:  # the package raises bare Exceptions
            raise FileError(f"cannot read the tokenizer {file}: {error}") from error
        self._is_bytes = "ByteLevel" in repr(self._tokenizer.decoder)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}  # None: not whole characters

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token."""
        texts = self._texts
        for token in set(ids).difference(texts):
            texts[token] = self._look_up(token)
        pieces = [texts[token] for token in ids]
        if None not in pieces:
            return pieces  # type: ignore[return-value]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        spelled = [decoder.decode(self._bytes[token]) for token in ids]
        if spelled:
            spelled[-1] += decoder.decode(b"", final=True)
        return spelled

    def _look_up(self, token: int) -> str | None:
        raw = self._spell(token)
        self._bytes[token] = raw
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return None

    def _spell(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token) if token >= 0 else None
        if name is None:
            return f"[no token {token}]".encode()
        if self._is_bytes and all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        if self._is_bytes:  # an added token stands for itself
            return str(name).encode()
        if len(name) == 6 and name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        # Decoded alone, a piece of SentencePiece loses its leading space; after another token it keeps it.
        before = self._tokenizer.decode([token], skip_special_tokens=False)
        both = self._tokenizer.decode([token, token], skip_special_tokens=False)
        return str(both[len(before) :]).encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a visible character: itself where it is one, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
