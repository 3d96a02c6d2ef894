"""Stands for the package that this directory is a part of, so that `import vramctl` finds it wherever this directory is on
the path, and nothing else that may lie beside the package.

`vramctl run` puts this directory first: in a program that it starts, the package is the one that belongs to the preloaded
library, whatever is installed for the program's own Python.
"""

import importlib.util
import pathlib
import runpy
import sys

_package = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # python -m vramctl
    runpy.run_path(str(_package / "__main__.py"), run_name=__name__)
else:
    _spec = importlib.util.spec_from_file_location(
        __name__, _package / "__init__.py", submodule_search_locations=[str(_package)]
    )
    assert _spec is not None and _spec.loader is not None  # of a file there is always one
    _module = importlib.util.module_from_spec(_spec)
    # The import in progress answers with what is registered under the name when it ends.
    sys.modules[__name__] = _module
    _spec.loader.exec_module(_module)
