"""Compiles the native kernels into a wheel, for all instruction sets of this processor's architecture.

Without a C compiler the wheel has none and fits any platform; the kernels are then compiled at first use, where there
is one. They depend on no version of Python or torch. An editable installation compiles them at first use, too.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from foredraft.core.errors import ModelError
        from foredraft.model.native import build

        command = build.compiler()
        if command is None:
            self.app.display_warning("There is no C compiler, so the wheel has no native kernels.")
            return
        folder = Path(self.root) / "build" / "kernels"
        for target in build.targets():
            try:
                build.compile_library(target, folder / target.filename, command=command)
            except ModelError as error:
                self.app.display_warning(f"The wheel has no kernels for {target.name}. {error}")
                continue
            path = build.BUILT.relative_to(Path(self.root) / "src") / target.filename
            build_data["force_include"][str(folder / target.filename)] = path.as_posix()
        if build_data["force_include"]:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
