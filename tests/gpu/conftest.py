"""The markers of pytest: a test is marked with the name of its file, as in `pytest tests/gpu -m two_gpus`."""

MARKERS = {"one_gpu": "needs a GPU", "two_gpus": "needs two GPUs", "engine": "needs a GPU and an inference engine"}


def pytest_configure(config):
    for name, what in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {what}")


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(item.path.stem.removeprefix("test_"))
