"""Redirects `import vramctl` to the enclosing package, without exposing anything else beside that package.

`vramctl run` puts this directory first on the path, so a program gets the package that matches the preloaded library,
whatever its own Python has installed.
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
    assert _spec is not None and _spec.loader is not None  # always true for a .py file
    _module = importlib.util.module_from_spec(_spec)
    # The import in progress returns whatever is in sys.modules when it ends.
    sys.modules[__name__] = _module
    _spec.loader.exec_module(_module)
