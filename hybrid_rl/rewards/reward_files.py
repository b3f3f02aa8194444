"""Import of reward files: files of the user with functions that score responses. Only worker processes import them.

A file is imported once per process, as one module however many of its functions are used. Its folder is importable as
it is for a script, with two differences: a name of the standard library always means the standard library, and a reward
file that is named like an installed package does not hide that package.

A file in a folder with `__init__.py` is imported under its full name, `package.module`, so that relative imports work.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class RewardFolder:
    """The modules next to a reward file, which are importable while the folder is active.

    A folder is a finder in `sys.meta_path`. Only one is active at a time, so that two folders may have modules of the
    same name: the modules of a folder leave `sys.modules` when another folder becomes active.
    """

    _active: "RewardFolder | None" = None

    def __init__(self, folder: Path, package_root: Path) -> None:
        """Describe a folder.

        Args:
            folder: absolute path.
            package_root: the folder above the outermost package that contains `folder`; `folder` itself if it is no
                package.
        """
        self._folder, self._root = folder, package_root
        self._package = folder.relative_to(package_root).parts[:1]
        self._names: set[str] = set()  # top-level modules that this folder has given
        self._modules: dict[str, ModuleType] = {}  # those modules and their submodules while the folder is inactive
        self._is_on_path = False  # whether activate has added the folder to sys.path
        self._hidden: set[str] = set()  # names of reward files that mean an installed package

    def activate(self) -> None:
        """Make this folder's modules importable instead of the modules of the folder that was active."""
        active = RewardFolder._active
        if active is self:
            return
        if active is not None:
            active._deactivate()
        sys.meta_path.insert(0, self)
        if str(self._folder) not in sys.path:
            sys.path.append(str(self._folder))  # for processes that a function starts
            self._is_on_path = True
        sys.modules.update(self._modules)
        RewardFolder._active = self

    def _deactivate(self) -> None:
        sys.meta_path.remove(self)
        if self._is_on_path and str(self._folder) in sys.path:
            sys.path.remove(str(self._folder))
        self._is_on_path = False
        own = [name for name in sys.modules if name.partition(".")[0] in self._names]
        self._modules = {name: sys.modules.pop(name) for name in own}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a top-level module of this folder; None leaves the name to the other finders."""
        if path is not None or name in sys.stdlib_module_names or name in self._hidden:
            return None
        folder = self._root if (name,) == self._package else self._folder
        spec = PathFinder.find_spec(name, [str(folder)])
        if spec is None:
            return None
        other = installed(name, besides=self._folder)
        if other is not None and spec.loader is None:
            return None
        if other is not None and other.origin != spec.origin:
            print(f"import {name} takes {spec.origin}, which hides {other.origin}", file=sys.stderr)
        self._names.add(name)
        return spec

    def import_file(self, path: Path) -> ModuleType:
        """Return the module of a file of this folder, imported unless it already is.

        Raises:
            ImportError: the file lies in a package whose name belongs to another module.
            BaseException: whatever the file raises.
        """
        self.activate()
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("__file__") == str(path):
                return module
        return self._import_from_package(path) if self._package else self._import_alone(path)

    def _import_from_package(self, path: Path) -> ModuleType:
        parts = path.relative_to(self._root).with_suffix("").parts
        top, name = parts[0], ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        package = self._root / top
        loaded = getattr(sys.modules.get(top), "__file__", None) or str(package / "__init__.py")
        if top in sys.stdlib_module_names or loaded != str(package / "__init__.py"):
            raise ImportError(f"its package has the name of another module, {top}; rename the folder {package}")
        module = importlib.import_module(name)
        if module.__file__ != str(path):
            raise ImportError(f"{name} is {module.__file__}; rename one of the two")
        return module

    def _import_alone(self, path: Path) -> ModuleType:
        name = self._module_name(path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        self._names.add(name)
        sys.modules[name] = module  # for dataclasses, pickle and neighbours that import this file
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module

    def _module_name(self, path: Path) -> str:
        """Return the file's name without .py, or another name if that one means another module."""
        stem = path.stem
        here = PathFinder.find_spec(stem, [str(self._folder)])
        is_other = here is None or here.origin != str(path)  # a package of the same name, or a name with a dot
        is_taken = stem in sys.modules or stem in sys.stdlib_module_names or installed(stem, besides=self._folder)
        if not is_other and not is_taken:
            return stem
        if not is_other:
            self._hidden.add(stem)
        return "reward_file_" + stem.replace(".", "_")


def installed(name: str, *, besides: Path) -> ModuleSpec | None:
    """Return the spec of a top-level module that lies on `sys.path` outside one folder; None if there is none.

    A folder without `__init__.py` does not count, because it hides no module.
    """
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if os.path.realpath(entry) != str(besides)])
    return None if spec is None or spec.loader is None else spec


class RewardFiles:
    """The reward files of a process, each imported once."""

    def __init__(self) -> None:
        self._folders: dict[Path, RewardFolder] = {}

    def folder_of(self, path: Path) -> RewardFolder:
        """Return the folder of a file, the same object for all of its files."""
        folder = path.parent
        if folder not in self._folders:
            self._folders[folder] = RewardFolder(folder, package_root(folder))
        return self._folders[folder]


def package_root(folder: Path) -> Path:
    """Return the folder above the outermost package that contains a folder; the folder itself if it is no package."""
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder
