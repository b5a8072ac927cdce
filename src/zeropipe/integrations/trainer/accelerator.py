"""An Accelerator that counts pipelines and not processes: all processes of a pipeline get the same rows."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.utils import recursively_apply
from torch import Tensor

from zeropipe.core.mesh import DATA_DIMENSIONS


class PipelineAccelerator(accelerate.Accelerator):
    """`num_processes` and `process_index` are those of pipelines; `gather` returns the values of each pipeline once."""

    leaders: tuple[int, ...]  # the first process of each pipeline
    pipeline: int  # the index of this process's pipeline

    @staticmethod
    def adopt(accelerator: accelerate.Accelerator, mesh: Any) -> PipelineAccelerator:
        """Make Trainer's own accelerator one of this class, for the pipelines of a mesh."""
        accelerator.__class__ = PipelineAccelerator
        names = tuple(mesh.mesh_dim_names)
        index = tuple(slice(None) if name in DATA_DIMENSIONS else 0 for name in names)
        accelerator.leaders = tuple(mesh.mesh[index].flatten().tolist())
        accelerator.pipeline = 0
        for name, size, coordinate in zip(names, mesh.mesh.shape, mesh.get_coordinate()):
            if name in DATA_DIMENSIONS:
                accelerator.pipeline = accelerator.pipeline * size + coordinate
        accelerator.dataloader_config.dispatch_batches = False  # a dispatched batch goes to each process
        return accelerator

    @property
    def num_processes(self) -> int:
        return len(self.leaders)

    @property
    def process_index(self) -> int:
        return self.pipeline

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As it is: a full model stays where it is, its stages are on the device."""
        return model

    def gather(self, tensor: Any) -> Any:
        """As Accelerator.gather, from one process of each pipeline."""
        size = self.state.num_processes

        def pick(gathered: Tensor) -> Tensor:
            return gathered.unflatten(0, (size, -1))[list(self.leaders)].flatten(0, 1)

        gathered = super().gather(tensor)
        return gathered if size == 1 else recursively_apply(pick, gathered, error_on_other_type=True)
