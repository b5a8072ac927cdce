"""verl has no platform without an accelerator: this one is the CPU. Import it before the rest of verl."""

from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA


class OnCPU(PlatformCUDA):
    """The CPU in the place of a GPU."""

    device_name = vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def empty_cache(self) -> None:
        pass


platform_manager.set_platform(OnCPU())
