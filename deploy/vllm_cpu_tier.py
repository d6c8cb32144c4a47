"""vLLM's KV tiers on a machine without a GPU: for tests, and for a first try.

vLLM's `TieringOffloadingSpec` copies between a GPU and host memory, and refuses to start without a GPU. Everything else
of it (what is kept and looked up, the files, the limits) knows no GPU. This spec is that one, with copies between the
KV cache of a CPU server and the same host memory in place of those; they are done when they are asked for.
`install-vllm-cpu.sh` puts it into the virtual environment, where vLLM loads it by `spec_module_path`.

Source: vLLM 0.32 and 0.33, v1/kv_offload/cpu/{spec,gpu_worker}.py.
"""

from collections.abc import Iterator

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Run = tuple[slice, slice]
"""Bytes of a page of this worker, and the same bytes in a page of host memory."""


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` where the KV cache is in host memory already."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            if self.blocks_per_chunk != 1:
                raise ValueError("only with chunks of one block: leave block_size and blocks_per_chunk out")
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _Worker(kv_caches, region, self.config.canonical_layout)
        return self._worker


class _Worker(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, is_canonical: bool) -> None:
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._is_canonical = is_canonical
        self._finished: list[TransferResult] = []
        self._pages, self._kept = [], []
        for index, cache in enumerate(kv_caches.tensors):
            self._pages.append(cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes)))
            if is_canonical:
                refs = [ref for group in self._groups for ref in group if ref.tensor_idx == index]
                size = max(ref.mapping.canonical_page_size_bytes for ref in refs)
                self._kept.append(region.create_next_canonical_view(size))
            else:
                self._kept.append(region.create_next_worker_view(cache.page_size_bytes))

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        num_bytes = 0
        for ref, pages, kept in self._blocks(src_spec, src_spec, dst_spec):
            if self._is_canonical:  # those who hold the same bytes take turns writing them
                is_mine = kept % ref.mapping.num_writers == ref.mapping.writer_index
                pages, kept = pages[is_mine], kept[is_mine]
            for here, there in self._runs(ref):
                self._kept[ref.tensor_idx][kept, there] = self._pages[ref.tensor_idx][pages, here]
            num_bytes += len(pages) * ref.page_size_bytes
        return self._done(job_id, num_bytes)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        num_bytes = 0
        for ref, pages, kept in self._blocks(dst_spec, dst_spec, src_spec):
            for here, there in self._runs(ref):
                self._pages[ref.tensor_idx][pages, here] = self._kept[ref.tensor_idx][kept, there]
            num_bytes += len(pages) * ref.page_size_bytes
        return self._done(job_id, num_bytes)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids) -> None:
        return

    def shutdown(self) -> None:
        self._kept.clear()
        self._region.cleanup()

    def _blocks(self, sized, of_cache: BlockIDsLoadStoreSpec, of_host: BlockIDsLoadStoreSpec) -> Iterator:
        """Each layer's pages here and in host memory, pair by pair."""
        start = 0
        for refs, size in zip(self._groups, sized.group_sizes, strict=True):
            pages = torch.from_numpy(of_cache.block_ids[start : start + size]).long()
            kept = torch.from_numpy(of_host.block_ids[start : start + size]).long()
            start += size
            for ref in refs:
                yield ref, pages, kept

    def _runs(self, ref: CanonicalKVCacheRef) -> Iterator[Run]:
        if not self._is_canonical:
            yield slice(0, ref.page_size_bytes), slice(0, ref.page_size_bytes)
            return
        for run in ref.mapping.runs:
            for i in range(run.num_fragments):
                here, there = run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride
                yield slice(here, here + run.fragment_size), slice(there, there + run.fragment_size)

    def _done(self, job_id: int, num_bytes: int) -> bool:
        self._finished.append(TransferResult(job_id, True, num_bytes, 0.0))
        return True
