"""How simulated servers share their KV in a folder, like vLLM's file tier behind `OffloadingConnector` (vLLM 0.33).

There is one file for each whole block, named by its tokens, all tokens before them, the salt and the model, so every
server finds a block that any server computed. The files are empty: their existence stands for KV. A request's blocks
are looked up before it is queued, and written when it has ended, as far as it ran. Nothing is ever removed: as with the
real tier, that is up to the folder's owner; missing blocks are recomputed.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from engines.simulated.live import LiveEngine, blocks_of
from engines.simulated.running import Asked, Running

# 40K tokens of a 14B model from a disk of 5 GB/s take 1.3 s.
_LOAD_S_PER_TOKEN = 3.2e-5


class KvTier:
    """One server's access to the folder.

    Args:
        model: what the server loaded; it is shared only with servers of the same model, whatever their name.
    """

    def __init__(self, live: LiveEngine, folder: Path, model: str, speed_up: float) -> None:
        self._live = live
        self._folder = folder
        self._model = model
        self._speed_up = speed_up
        folder.mkdir(parents=True, exist_ok=True)

    async def loaded(self, asked: Asked) -> None:
        """Load the beginning of a request's first prompt into the cache, as far as the folder has it and the cache
        lacks it.
        """
        prompt, size = asked.prompts[0], self._live.block_size
        pieces = blocks_of(prompt, size, asked.cache_salt)
        num_here = num_there = self._live.num_cached(pieces) // size
        for path in list(self._files(prompt, asked.cache_salt))[num_here:]:
            if not path.exists():
                break
            num_there += 1
        if num_there > num_here:
            num_tokens = (num_there - num_here) * size
            await asyncio.sleep(num_tokens * _LOAD_S_PER_TOKEN / self._speed_up)
            self._live.adopt(pieces[:num_there])

    def keep(self, running: Running) -> None:
        """Write what a request's choices computed: their prompts, and all but the last token of their outputs."""
        asked, running.is_kept = running.asked, True
        for generation, prompt in zip(running.generations, asked.prompts, strict=True):
            if generation.admitted_at is None:
                continue
            made = generation.answer.token_ids[: max(generation.num_done - 1, 0)]
            for path in self._files([*prompt, *made], asked.cache_salt):
                if not path.exists():
                    path.parent.mkdir(exist_ok=True)
                    path.touch()

    def _files(self, ids: Sequence[int], salt: str) -> Iterator[Path]:
        """The file of each whole block of a sequence, in order."""
        size, packed = self._live.block_size, array("I", ids).tobytes()
        name = blake2b(f"{self._model}\0{size}\0{salt}".encode(), digest_size=16).digest()
        for block in range(len(ids) // size):
            name = blake2b(name + packed[block * size * 4 : (block + 1) * size * 4], digest_size=16).digest()
            yield self._folder / name[:1].hex() / name.hex()
