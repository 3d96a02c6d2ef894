"""The import hook and the `sitecustomize` that installs it, with modules made for these tests."""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zipfile

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "vramctl"
SITE = PACKAGE / "site"


class Folder(unittest.TestCase):
    """Base of tests with a folder for modules."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path


class WhenImported(Folder):
    """`when_imported` in this process, with everything restored afterwards."""

    def setUp(self):
        super().setUp()
        spec = importlib.util.spec_from_file_location("imports_under_test", PACKAGE / "_imports.py")
        self.imports = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.imports)
        finders, modules, path = list(sys.meta_path), set(sys.modules), list(sys.path)

        def put_back():
            sys.meta_path[:], sys.path[:] = finders, path
            for name in set(sys.modules) - modules:
                del sys.modules[name]
            importlib.invalidate_caches()

        self.addCleanup(put_back)
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        self.seen = []

    def watch(self, name):
        self.imports.when_imported(name, self.see)

    def see(self, module):
        self.seen.append((module.__name__, getattr(module, "value", None)))

    def test_after_the_module_has_executed_and_only_then(self):
        self.write("some_module.py", "value = 1\nvalue = 2")
        self.watch("some_module")
        self.assertEqual(self.seen, [])
        import some_module

        self.assertEqual(self.seen, [("some_module", 2)])
        self.assertNotIn("exec_module", vars(some_module.__spec__.loader), "the loader is restored")
        importlib.import_module("some_module")
        self.assertEqual(len(self.seen), 1)

    def test_a_module_that_is_there_already(self):
        self.write("some_module.py", "value = 1")
        importlib.import_module("some_module")
        self.watch("some_module")
        self.watch("some_module")
        self.assertEqual(self.seen, [("some_module", 1)], "and only once")

    def test_a_reload_is_another_execution(self):
        path = self.write("some_module.py", "value = 1")
        self.watch("some_module")
        module = importlib.import_module("some_module")
        path.write_text("value = 234")
        importlib.reload(module)
        self.assertEqual(self.seen, [("some_module", 1), ("some_module", 234)])

    def test_submodules_and_packages(self):
        self.write("some_package/__init__.py", "value = 'package'")
        self.write("some_package/inner/__init__.py", "from .deep import value")
        self.write("some_package/inner/deep.py", "value = 'deep'")
        self.watch("some_package.inner.deep")
        self.watch("some_package")
        self.watch("some_package.missing")
        importlib.import_module("some_package.inner")
        self.assertEqual(self.seen, [("some_package", "package"), ("some_package.inner.deep", "deep")])
        with self.assertRaises(ModuleNotFoundError):
            importlib.import_module("some_package.missing")

    def test_the_program_does_not_see_what_goes_wrong_here(self):
        self.write("some_module.py", "value = 1")
        self.watch("some_module")

        def fail(module):
            raise ValueError("defect of ours")

        self.imports.when_imported("some_module", fail)
        with self.assertLogs("vramctl", "WARNING") as logs:
            importlib.import_module("some_module")
        self.assertIn("left some_module unchanged", logs.output[0])
        self.assertEqual(len(self.seen), 1, "the other callbacks still run")

    def test_a_module_that_fails_to_import_fails_as_ever(self):
        self.write("some_module.py", "raise KeyError('its own')")
        self.watch("some_module")
        with self.assertRaisesRegex(KeyError, "its own"):
            importlib.import_module("some_module")
        self.assertEqual(self.seen, [])

    def test_an_archive_s_loader_serves_many_modules(self):
        with zipfile.ZipFile(self.folder / "archive.zip", "w") as archive:
            archive.writestr("zipped_a.py", "import zipped_b\nvalue = 'a'")
            archive.writestr("zipped_b.py", "value = 'b'")
        sys.path.insert(0, str(self.folder / "archive.zip"))
        self.watch("zipped_a")
        module = importlib.import_module("zipped_a")
        self.assertEqual(module.value, "a")
        # Before Python 3.10, an archive's loader has no exec_module, so no callback runs.
        self.assertEqual(self.seen, [("zipped_a", "a")] if sys.version_info >= (3, 10) else [])

    def test_beside_another_tool_of_this_kind(self):
        """With a finder that asks all others, like a tracing tool's: no endless recursion, and one module."""

        class Other:
            busy = False

            def find_spec(self, name, path=None, target=None):
                if Other.busy or name != "some_module":
                    return None
                Other.busy = True
                try:
                    return importlib.util.find_spec(name)
                finally:
                    Other.busy = False

        self.write("some_module.py", "value = 1")
        self.watch("some_module")
        finders = list(sys.meta_path)
        for place in (0, 1, len(finders)):
            with self.subTest(place=place):
                sys.modules.pop("some_module", None)
                self.seen.clear()
                sys.meta_path[:] = [*finders[:place], Other(), *finders[place:]]
                importlib.import_module("some_module")
                self.assertEqual(self.seen, [("some_module", 1)])

    def test_other_modules_are_not_touched(self):
        self.write("some_module.py", "value = 1")
        self.watch("another_module")
        module = importlib.import_module("some_module")
        self.assertEqual(self.seen, [])
        self.assertEqual(type(module.__spec__.loader).__name__, "SourceFileLoader")


class Sitecustomize(Folder):
    """Python's startup with our directory first on PYTHONPATH."""

    def python(self, program, *options, preload=None, path=(), executable=sys.executable):
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VRAMCTL", "COV", "LD_PRELOAD"))
        }
        env["PYTHONPATH"] = os.pathsep.join([str(SITE), *map(str, path)])
        if preload:
            env["LD_PRELOAD"] = preload
        done = subprocess.run(
            [executable, *options, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True, timeout=60
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        # The loader complains about a missing library, but the program runs.
        errors = [line for line in done.stderr.splitlines() if "cannot be preloaded" not in line]
        self.assertEqual(errors, [])
        return done.stdout.strip()

    MODULES = "import sys; print(sorted(name for name in sys.modules if 'vramctl' in name or name in ('ctypes', 'logging')))"

    def test_nothing_is_imported_where_nothing_is_preloaded(self):
        self.assertEqual(self.python(self.MODULES), "['_vramctl_sitecustomize']")

    def test_a_preloaded_program_pays_for_one_small_module(self):
        self.assertEqual(
            self.python(self.MODULES, preload="/nowhere/libvramctl.so"), "['_vramctl_sitecustomize', 'vramctl._imports']"
        )

    def test_an_engine_without_the_library_is_left_alone(self):
        """LD_PRELOAD is set, but our library is not in the process."""
        self.write("vllm/__init__.py", "")
        self.write("vllm/v1/worker/gpu_worker.py", "class Worker:\n    def load_model(self): return 'as ever'")
        program = "import vllm.v1.worker.gpu_worker as w; print(w.Worker().load_model(), hasattr(w.Worker.load_model, '_vramctl_wraps'))"
        path = [self.folder, PACKAGE.parent]
        self.assertEqual(self.python(program, preload="/nowhere/libother.so", path=path), "as ever False")

    def test_the_sitecustomize_that_was_there_runs(self):
        self.write("a/sitecustomize.py", "import sys; sys.stdout.write('first '); name = __name__; own = __file__")
        self.write("b/sitecustomize.py", "import sys; sys.stdout.write('second ')")
        program = "import sitecustomize; print(sitecustomize.name, sitecustomize.own.endswith('a/sitecustomize.py'))"
        path = [self.folder / "empty", self.folder / "a", self.folder / "b"]
        for preload in (None, "/nowhere/libvramctl.so"):
            self.assertEqual(self.python(program, preload=preload, path=path), "first sitecustomize True")

    def test_one_that_chains_too_is_run_once(self):
        """A tracer's, for example, runs the first one on the path that is not its own: ours again."""
        self.write(
            "tracer/sitecustomize.py",
            """
            import os, sys
            from importlib.machinery import PathFinder
            from importlib.util import module_from_spec
            sys.stdout.write("tracer ")
            here = os.path.dirname(os.path.abspath(__file__))
            spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if place != here])
            module = module_from_spec(spec)
            sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
            """,
        )
        self.assertEqual(self.python("print('program')", path=[self.folder / "tracer"]), "tracer program")

    def test_our_directory_twice_on_the_path(self):
        self.write("a/sitecustomize.py", "import sys; sys.stdout.write('once ')")
        self.assertEqual(self.python("print()", path=[SITE, f"{SITE}/", self.folder / "a", SITE]), "once")

    def test_an_error_in_the_next_one_is_reported_by_python_as_ever(self):
        self.write("a/sitecustomize.py", "raise ValueError('its own')")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(self.folder / "a")])}
        done = subprocess.run([sys.executable, "-c", "print('runs')"], env=env, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stdout, "runs\n")
        self.assertIn("its own", done.stderr)

    def test_old_pythons_have_the_sitecustomize_that_was_there(self):
        self.write("a/sitecustomize.py", "import sys; sys.stdout.write('its own ')")
        found = [
            *map(shutil.which, ("python2.7", "python3.6")),
            *pathlib.Path.home().glob(".pyenv/versions/[23].[67].*/bin/python"),
        ]
        olds = [path for path in found if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]
        if not olds:
            self.skipTest("not run: no Python before 3.7 is installed")
        program = "import sys; sys.stdout.write(sys.modules['sitecustomize'].__file__.replace('.pyc', '.py'))"
        for old in olds:
            with self.subTest(old):
                printed = self.python(program, preload="/nowhere/libvramctl.so", path=[self.folder / "a"], executable=str(old))
                self.assertEqual(printed, f"its own {self.folder}/a/sitecustomize.py")

    def test_engines_find_the_plugins_where_another_sitecustomize_comes_first(self):
        """A launcher, such as opentelemetry-instrument, has put its own before ours, which then does not run."""
        self.write("launcher/sitecustomize.py", "import sys; sys.stdout.write('launcher\\n')")
        program = """
            import importlib.metadata
            found = importlib.metadata.distribution("vramctl")
            print(found.version, *sorted(f"{one.group}: {one.value}" for one in found.entry_points))
        """
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder / "launcher"), str(SITE)])}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True, timeout=60
        )
        project = (PACKAGE.parent.parent / "pyproject.toml").read_text()
        plugins = re.findall(r'^\[project.entry-points."(.*)"\]\nvramctl = "(.*)"$', project, re.MULTILINE)
        self.assertEqual(len(plugins), 2)
        version = re.search(r'^__version__ = "(.*)"', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
        wanted = [version[1], *sorted(": ".join(plugin) for plugin in plugins)]
        self.assertEqual(done.stdout, f"launcher\n{' '.join(wanted)}\n", done.stderr)

    def test_without_site_and_isolated(self):
        program = "import sys; print('_vramctl_sitecustomize' in sys.modules)"
        for option in ("-S", "-I"):
            self.assertEqual(self.python(program, option, preload="/nowhere/libvramctl.so"), "False")

    def test_in_a_virtual_environment_and_in_spawned_children(self):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder / "venv"], check=True, timeout=120)
        self.write(
            "child.py",
            """
            import multiprocessing, sys
            def look(queue): queue.put("vramctl._imports" in sys.modules)
            def main():
                spawn = multiprocessing.get_context("spawn")
                queue = spawn.SimpleQueue()
                child = spawn.Process(target=look, args=(queue,))
                child.start()
                print(queue.get(), sys.prefix != sys.base_prefix)
                child.join()
            """,
        )
        program = "import child\nif __name__ == '__main__': child.main()"
        python = self.folder / "venv/bin/python"
        printed = self.python(program, preload="/nowhere/libvramctl.so", path=[self.folder], executable=python)
        self.assertEqual(printed, "True True")


if __name__ == "__main__":
    unittest.main()
