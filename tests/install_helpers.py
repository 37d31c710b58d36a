"""Sources and packages of a Horovod that is none."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest
import tensorflow as tf

LISTS = """\
# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")

# Create library
add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
"""

HERE = tf.__version__


def write(path: Path, text: str, executable: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_archive(path: Path, files: dict[str, str], *more: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
        for member in more:
            tar.addfile(member)
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a package `horovod` of these files before any installed one."""

    def put(files: dict[str, str], version="0.27.0") -> None:
        root = tmp_path / "fake"
        write(root / "horovod" / "__init__.py", "")
        for name, text in files.items():
            write(root / "horovod" / name, text)
        told = f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n"
        write(root / f"horovod-{version}.dist-info" / "METADATA", told)
        monkeypatch.setenv("PYTHONPATH", str(root))

    return put
