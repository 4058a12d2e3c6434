"""The code that travels to the nodes of a cluster."""

import os
import subprocess
import sys

from rlhf.flows.running.cluster import write_package


def test_code_that_travels_is_loaded_on_a_node_with_an_installed_project(tmp_path):
    package = tmp_path / "code.zip"
    write_package(package, tmp_path)
    installed = tmp_path / "installed" / "rlhf" / "stages"
    installed.mkdir(parents=True)
    for folder in (installed.parent, installed):
        (folder / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{tmp_path / 'installed'}"}
    script = "import rlhf.stages, rlhf.tuning.names; print(rlhf.stages.__file__, rlhf.tuning.names.__file__)"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert all(place.startswith(str(package)) for place in done.stdout.split()), done.stdout
