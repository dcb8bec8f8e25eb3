"""The part of the build that pyproject.toml cannot express: the bundled pair and its clips in demo/
are installed as ``hippo.bundled``, so that ``hippo demo`` works without a checkout."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["hippo*", "services*", "gateway*"]),
        "hippo.bundled.models",
        "hippo.bundled.clips",
    ],
    package_dir={"hippo.bundled.models": "demo/models", "hippo.bundled.clips": "demo/clips"},
    package_data={
        "hippo": ["py.typed"],
        "hippo.page": ["*.html", "*.css", "*.js", "*.svg"],
        "hippo.bundled.models": ["target/*", "draft/*"],
        "hippo.bundled.clips": ["*.mp4", "facts.json"],
    },
)
