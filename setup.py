"""Builds the native CPU kernels (`outrider.kernels.native`); everything else is in pyproject.toml.

The kernels are optional: where they cannot be built, Outrider installs without them, says so in one
line, and computes on PyTorch. They are a plain shared library with a C interface, loaded with
ctypes: no Python or PyTorch headers. Each instruction set is a source file with its own flags, and
the processor is asked at run time.

Environment:
    OUTRIDER_NATIVE=0           do not build them
    OUTRIDER_NATIVE=require     fail where they cannot be built
    OUTRIDER_SANITIZE=address,undefined   build with these sanitizers, for tests
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

HERE = Path("src/outrider/kernels/native")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
# gcc 12 warns of its own headers
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-unused-function"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512_VNNI = AVX2 + [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
INSTRUCTION_SETS = {
    "isa_avx512.cpp": [*AVX512_VNNI, "-mavx512bf16"],
    "isa_avx512_vnni.cpp": AVX512_VNNI,
    "isa_avx2.cpp": AVX2,
}
DEFINES = [("OUTRIDER_AVX512", None), ("OUTRIDER_AVX2", None)]


class BuildKernels(build_ext):
    """Compiles each file with its own flags, and forgives failure unless told not to."""

    def build_extension(self, extension: Extension) -> None:
        try:
            self._build(extension)
        except Exception as error:
            if os.environ.get("OUTRIDER_NATIVE") == "require":
                raise
            failures = (CompileError, LinkError)
            failed = "the C++ compiler failed" if isinstance(error, failures) else repr(error)
            print(f"outrider: no native CPU kernels ({failed}); PyTorch is used", file=sys.stderr)

    def _build(self, extension: Extension) -> None:
        sanitizers = os.environ.get("OUTRIDER_SANITIZE", "")
        extra = [f"-fsanitize={sanitizers}", "-g"] if sanitizers else []
        objects = []
        for source in extension.sources:
            flags = INSTRUCTION_SETS.get(Path(source).name, [])
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=extension.define_macros,
                extra_postargs=[*FLAGS, *flags, *extra],
                depends=extension.depends,
            )
        path = self.get_ext_fullpath(extension.name)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, path, extra_postargs=["-pthread", *extra], target_lang="c++"
        )

    def copy_extensions_to_source(self) -> None:
        """Skip what was not built (editable installs)."""
        built = Path(self.build_lib)
        self.extensions = [
            e for e in self.extensions if (built / self.get_ext_filename(e.name)).exists()
        ]
        super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


def kernels() -> list[Extension]:
    """The extension, where it can work at all: Linux on x86-64."""
    if os.environ.get("OUTRIDER_NATIVE") == "0":
        return []
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        print("outrider: no native CPU kernels for this machine; PyTorch is used", file=sys.stderr)
        return []
    return [
        Extension(
            "outrider.kernels._native",
            sources=sorted(str(path) for path in HERE.glob("*.cpp")),
            depends=sorted(str(path) for path in HERE.glob("*.h")),
            define_macros=DEFINES,
            language="c++",
        )
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
