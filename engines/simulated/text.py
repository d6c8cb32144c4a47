"""Text of the simulated model: a reversible tokenizer, and a continuation that depends only on the tokens so far.

A token is up to four printable ASCII characters with an optional space before them, up to four control characters or
spaces, or up to three bytes of anything else. Its id contains its bytes, so there is no vocabulary to load. Ids below
128 are special and have no text. The model outputs words that are one token each, so that its answer, sent back as a
message, gives the same tokens and hits the prefix cache.

The next token is drawn from a checksum of all tokens before it. So a generation that is cut off and resumed from its
own prefix, on any engine, continues exactly as it would have.
"""

import codecs
import re
from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

END, SYSTEM, USER, ASSISTANT, TOOL = 1, 2, 3, 4, 5
"""Special tokens: the end of a message, and the beginning of one for each role."""

_MAX_ID = 2**31 - 1
_SPACE_FLAG = 1 << 29
_BYTES_FLAG = 1 << 30
_PIECE = re.compile(rb" ?[!-~]{1,4}|[\x00-\x20\x7f]{1,4}|[\x80-\xff]{1,3}")

# 128 words of at most four letters: with the space before it, each is one token.
_WORDS = re.findall(
    r"\w+",
    "main the of and to in is it for on as at be by or an we you he she they this that with from have had was "
    "were will can may not but all any each one two more most some such than then when what who how why out up "
    "down over into just only also very well now here so if no yes see get make take give find tell ask work "
    "seem feel try call need turn plan step test code file line name type list read done next last case data "
    "text user time year day man life hand part eye week fact home room area book word side kind head far both "
    "long own few old new good big high low us ",
)

_MEMO_LIMIT = 200_000  # pieces and ids; about 30 MB


class _PieceIds(dict[bytes, int]):
    """Ids of pieces seen so far; a dictionary hit costs a tenth of computing the id."""

    def __missing__(self, piece: bytes) -> int:
        if len(self) >= _MEMO_LIMIT:
            self.clear()
        self[piece] = made = _id_of(piece)
        return made


class Tokenizer:
    """Text to token ids and back; `decode(encode(text)) == text` for every text."""

    def __init__(self) -> None:
        self._ids = _PieceIds()
        self._of_text: dict[str, list[int]] = {}
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. The list belongs to the tokenizer: copy it before changing it."""
        known = self._of_text.get(text)
        if known is None:
            ids = self._ids
            pieces = _PIECE.findall(text.encode("utf-8", "surrogatepass"))
            known = [ids[piece] for piece in pieces]
            # Agents send their whole history each turn, so most messages were seen before.
            if len(self._of_text) >= 4096:
                self._of_text.clear()
            self._of_text[text] = known
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special and unknown ids have none."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def texts(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; a character of several tokens comes with the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = len(ids) - 1
        return [decoder.decode(self.bytes_of(id), final=i == last) for i, id in enumerate(ids)]

    def bytes_of(self, id: int) -> bytes:
        known = self._bytes.get(id)
        if known is None:
            if len(self._bytes) >= _MEMO_LIMIT:
                self._bytes.clear()
            known = self._bytes[id] = _bytes_of(id)
        return known


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each.

    Raises:
        ValueError: an id is not in the vocabulary.
    """
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError("Token id is out of vocabulary") from error


class Continuation:
    """The tokens that follow a prefix, one at a time.

    Args:
        prefix: packed token ids.
        salt: what else the answer depends on: seed, choice index, weight version. 0 is the greedy answer.
        mean_tokens: the average length of an answer that nothing else ends.
    """

    def __init__(self, prefix: bytes, salt: int, mean_tokens: int) -> None:
        self._checksum = crc32(prefix)
        self._salt = salt
        self._end_below = (1 << 24) // max(mean_tokens, 1)

    def next(self, may_end: bool) -> int:
        """The next token; `END` only if the answer may end."""
        draw = ((self._checksum ^ self._salt) * 0x9E3779B1) & 0xFFFFFFFF
        draw ^= draw >> 15
        if may_end and (draw & 0xFFFFFF) < self._end_below:
            self._checksum = crc32(_END_BYTES, self._checksum)
            return END
        word = draw >> 25
        self._checksum = crc32(_SAID_BYTES[word], self._checksum)
        return _SAID[word]

    def log_probability(self, rank: int) -> float:
        """A made-up log-probability of the last token, or of an alternative of that rank."""
        return -((self._checksum >> 7) % 1000 + 1) / 2000 - 1.5 * rank


def rival(id: int, rank: int) -> int:
    """An alternative to a token."""
    return _SAID[(id * 31 + rank * 17) % len(_SAID)]


def _id_of(piece: bytes) -> int:
    if piece[0] >= 0x80:
        return _BYTES_FLAG | int.from_bytes(b"\x01" + piece, "big")
    flag = 0
    if piece[0] == 0x20 and len(piece) > 1 and piece[1] > 0x20:
        flag, piece = _SPACE_FLAG, piece[1:]
    id = 1
    for byte in piece:
        id = id << 7 | byte
    return id | flag


def _bytes_of(id: int) -> bytes:
    if id < 128 or id > _MAX_ID:
        return b""
    if id & _BYTES_FLAG:
        body = id & ~_BYTES_FLAG
        return body.to_bytes(4, "big").lstrip(b"\x00")[1:]
    body = id & ~_SPACE_FLAG
    characters = []
    while body > 1:
        characters.append(body & 0x7F)
        body >>= 7
    return (b" " if id & _SPACE_FLAG else b"") + bytes(reversed(characters))


_SAID = [_id_of(b" " + word.encode()) for word in _WORDS]
_SAID_BYTES = [packed([id]) for id in _SAID]
_END_BYTES = packed([END])
