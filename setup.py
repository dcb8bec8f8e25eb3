"""The part of the build that pyproject.toml cannot express: the bundled pair and its clips in demo/
are installed as ``hippo.bundled``, so that ``hippo demo`` works without a checkout. An image has
its models elsewhere, and is built without demo/."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["hippo*", "services*", "gateway*"])
folders = {"hippo.bundled.models": "demo/models", "hippo.bundled.clips": "demo/clips"}
if not Path("demo").is_dir():
    folders = {}

setup(
    packages=[*packages, *folders],
    package_dir=folders,
    package_data={
        "hippo": ["py.typed"],
        "hippo.page": ["*.html", "*.css", "*.js", "*.svg"],
        "hippo.bundled.models": ["target/*", "draft/*"],
        "hippo.bundled.clips": ["*.mp4", "facts.json"],
    },
)
