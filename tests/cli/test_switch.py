"""`bitshard use`, `unuse` and `report` on folders of installed packages: what is exchanged, put back, and said."""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest
from bitshard_cli import installed, main, report, switch


@pytest.fixture(autouse=True)
def no_import(monkeypatch):
    """The report imports an active upstream in a process of its own; those made here are no real ones."""
    monkeypatch.setattr(report, "_plugin", lambda: report.Row("plug-in", "not asked"))


@pytest.fixture
def site(tmp_path, facade, monkeypatch):
    """An empty folder of installed packages, the only one on the path: whose distributions are found at once."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(installed, "CARRIED", facade)
    monkeypatch.setattr(installed, "home", lambda: folder)  # never those of the Python that runs the tests
    monkeypatch.setattr(sys, "path", [str(folder), *(path for path in sys.path if "site-packages" not in path)])
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def upstream(site: Path, version: str = "0.50.2", name: str = "bitsandbytes", record: bool = True) -> None:
    """A distribution as pip leaves it: a package, a library, compiled files, a script outside, metadata."""
    info = f"{name}-{version}.dist-info"
    files = {
        "bitsandbytes/__init__.py": f"__version__ = {version!r}\n",
        "bitsandbytes/nn/modules.py": "class Linear4bit: pass\n",
        "bitsandbytes/libbitsandbytes_cpu.so": "bytes\n" * 1000,
        "../../bin/bnb-tool": "#!/bin/sh\n",
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n",
        f"{info}/INSTALLER": "pip\n",
    }
    record_text = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    if record:
        files[f"{info}/RECORD"] = record_text
    write(site, files | {"bitsandbytes/__pycache__/made_later.pyc": "not in the RECORD"})


def test_files_outside_of_the_site_stay(site, tmp_path):
    """Whatever a RECORD names: scripts, files above, absolute paths, and what lies below a link out of the site."""
    upstream(site)
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, {"absolute.py": "", "linked.py": "", "above.py": ""})
    write(site, {"within.py": "", "folder/deeper.py": ""})
    (site / "link").symlink_to(elsewhere)
    record = site / "bitsandbytes-0.50.2.dist-info" / "RECORD"
    named = ["../elsewhere/above.py", f"{elsewhere}/absolute.py", "link/linked.py", "folder/../../elsewhere/above.py"]
    inside = ["../site-packages/within.py", "folder/deeper.py"]
    record.write_text(record.read_text() + "".join(f"{name},,\n" for name in [*named, *inside]))
    before, script = bytes_of(tmp_path), site / "../../bin/bnb-tool"
    outside, born = bytes_of(elsewhere), script.stat().st_ino
    assert len(outside) == 3
    switch.use(site)
    assert bytes_of(elsewhere) == outside and script.stat().st_ino == born
    assert not (site / "within.py").exists() and not (site / "folder" / "deeper.py").exists()
    switch.unuse(site)
    assert bytes_of(tmp_path) == before and bytes_of(elsewhere) == outside


def bytes_of(folder: Path) -> dict[str, str]:
    """{path: hash, mode and time of change} of all files below."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = f"{digest} {stat.st_mode} {stat.st_mtime_ns}"
    return found


def command(*words: str, capsys) -> tuple[int, dict]:
    """Status and JSON of a command in this process."""
    status = main.main([*words, "--json"])
    said = capsys.readouterr()
    assert not said.err
    return status, json.loads(said.out)


def version_in(site: Path) -> str | None:
    """Of the bitsandbytes that is installed there, whole."""
    found = [owner for owner in installed.owners() if owner.site == site]
    assert len(found) < 2 and all(owner.is_whole for owner in found)
    return found[0].version if found else None


def test_there_and_back(site, tmp_path, capsys, facade):
    upstream(site)
    before = bytes_of(tmp_path)
    for _ in range(2):
        status, found = command("use", capsys=capsys)
        assert status == 0 and found["changed"] and found["kept"] == "0.50.2"
        assert installed.FACADE_MARK in version_in(site)
        assert (Path(found["kept_in"]) / "bitsandbytes" / "libbitsandbytes_cpu.so").is_file()
        inside = {str(path.relative_to(facade)) for path in facade.rglob("*.py")}
        assert inside == {str(path.relative_to(site)) for path in site.rglob("*.py") if switch.KEPT not in path.parts}
        status, again = command("use", capsys=capsys)
        assert status == 0 and not again["changed"] and again["kept"] == "0.50.2"
        status, found = command("unuse", capsys=capsys)
        assert status == 0 and found["put_back"] == "0.50.2"
        assert bytes_of(tmp_path) == before and not (site / switch.KEPT).exists()
    status, found = command("unuse", capsys=capsys)
    assert status == 0 and not found["changed"] and bytes_of(tmp_path) == before


def test_without_an_upstream(site):
    assert switch.use(site)["kept"] == ""
    assert installed.FACADE_MARK in version_in(site)
    assert switch.unuse(site) == {"changed": True, "put_back": "", "site": str(site)}
    assert not list(site.iterdir())


def interrupted(monkeypatch, after: int, call) -> bool:
    """Runs `call` and interrupts it before its file operation number `after`; False: it had no more of them."""
    left = [after]

    def counted(function):
        def inner(*args, **options):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return function(*args, **options)

        return inner

    with monkeypatch.context() as patch:
        for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree"), (shutil, "copytree")):
            patch.setattr(module, name, counted(getattr(module, name)))
        try:
            call()
        except KeyboardInterrupt:
            return True
    return False


@pytest.mark.parametrize("begun", [switch.use, switch.unuse])
@pytest.mark.parametrize("then", [switch.use, switch.unuse])
def test_interrupted_anywhere(site, tmp_path, monkeypatch, begun, then):
    """Whatever was interrupted, either command ends in its own whole state."""
    upstream(site)
    before, after, interruptions = bytes_of(tmp_path), 0, 0
    while True:
        if begun is switch.unuse:
            switch.use(site)
        stopped = interrupted(monkeypatch, after, lambda: begun(site))
        if stopped and then is switch.use:
            assert report_rows(site)["mend"] is None or "bitshard" in report_rows(site)["mend"]
        then(site)
        if then is switch.use:
            assert installed.FACADE_MARK in version_in(site)
            switch.unuse(site)
        assert bytes_of(tmp_path) == before and not (site / switch.KEPT).exists(), f"behind operation {after}"
        if not stopped:
            break
        after, interruptions = after + 1, interruptions + 1
    assert interruptions >= 5


def killed(after: int, call) -> bool:
    """Runs `call` in a process of its own, which SIGKILL ends before its file operation number `after`; False: it had
    no more of them."""
    child = os.fork()
    if child == 0:
        left = [after]

        def counted(function):
            def inner(*args, **options):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return function(*args, **options)

            return inner

        for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree"), (shutil, "copytree")):
            setattr(module, name, counted(getattr(module, name)))
        try:
            call()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("begun", [switch.use, switch.unuse])
@pytest.mark.parametrize("then", [switch.use, switch.unuse])
def test_killed_anywhere(site, tmp_path, begun, then):
    """No line of a killed process runs any more: what is on the disk then is enough, byte for byte."""
    upstream(site)
    before, after, kills = bytes_of(tmp_path), 0, 0
    while True:
        if begun is switch.unuse:
            switch.use(site)
        stopped = killed(after, lambda: begun(site))
        for _ in range(2):  # repeated, nothing changes any more
            then(site)
            assert version_in(site) == (installed.carried_version() if then is switch.use else "0.50.2")
        switch.unuse(site)
        assert bytes_of(tmp_path) == before and not (site / switch.KEPT).exists(), f"before operation {after}"
        if not stopped:
            break
        after, kills = after + 1, kills + 1
    assert kills >= 5


def test_a_full_disk(site, tmp_path, capsys):
    """A real write that fails, while the façade is copied: nothing was moved, one line."""
    upstream(site)
    before, limits = bytes_of(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        status = main.main(["use"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert (
        status == 1 and said.count("\n") == 1 and "the façade cannot be copied: " in said and "File too large" in said
    )
    assert bytes_of(tmp_path) == before and not (site / switch.KEPT).exists()


def report_rows(site: Path) -> dict:
    rows = report._bitsandbytes()
    return {"text": "\n".join(row.text for row in rows), "mend": next((row.mend for row in rows if row.mend), None)}


def test_the_report_follows(site):
    assert report._active(installed.Owner("bitsandbytes", "0.50.2", site, site, [], False)).mend == "bitshard use"
    upstream(site)
    said = report_rows(site)
    assert "0.50.2: upstream" in said["text"] and said["mend"] == "bitshard use"
    switch.use(site)
    said = report_rows(site)
    assert "bitshard's façade" in said["text"] and said["mend"] is None
    assert f"bitsandbytes 0.50.2 in {site / switch.KEPT}" in said["text"]
    switch.unuse(site)
    assert "0.50.2: upstream" in report_rows(site)["text"]


def test_an_older_facade_is_replaced(site, tmp_path, monkeypatch):
    """A new engine carries a new façade; what was kept stays kept."""
    upstream(site)
    before = bytes_of(tmp_path)
    old = tmp_path / "old"
    shutil.copytree(installed.CARRIED, old)
    new, (info,) = installed.CARRIED, old.glob("*.dist-info")
    info.rename(old / "bitsandbytes-0.49.0+bitshard.0.0.9.dist-info")
    metadata = old / "bitsandbytes-0.49.0+bitshard.0.0.9.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(installed.carried_version(), "0.49.0+bitshard.0.0.9"))
    monkeypatch.setattr(installed, "CARRIED", old)
    switch.use(site)
    assert version_in(site) == "0.49.0+bitshard.0.0.9"
    monkeypatch.setattr(installed, "CARRIED", new)
    assert "of another version" in report_rows(site)["text"] and report_rows(site)["mend"] == "bitshard use"
    assert switch.use(site)["kept"] == "0.50.2"
    assert version_in(site) == installed.carried_version() and len(list(site.glob("*.dist-info"))) == 1
    switch.unuse(site)
    shutil.rmtree(old)
    assert bytes_of(tmp_path) == before


def test_pip_installed_another_upstream_since(site, tmp_path):
    """pip removes the façade by its RECORD; the new upstream is what is kept then."""
    upstream(site)
    switch.use(site)
    for path in (site / "bitsandbytes", *site.glob("bitsandbytes-*.dist-info")):
        shutil.rmtree(path)
    upstream(site, "0.51.0")
    with pytest.raises(switch.Mistake, match=r"0\.51\.0 was installed since and is active.*0\.50\.2 is kept"):
        switch.unuse(site)
    said = report_rows(site)
    assert "`bitshard unuse` puts it back" not in said["text"] and said["mend"] == "bitshard use"
    assert f"bitsandbytes 0.50.2 in {site / switch.KEPT}, which pip has replaced by 0.51.0 since" in said["text"]
    assert f"rm -r {site / switch.KEPT}" in said["text"]
    before = {name: text for name, text in bytes_of(site).items() if switch.KEPT not in name}
    assert switch.use(site)["kept"] == "0.51.0"
    assert [path.name for path in (site / switch.KEPT).glob("kept-*")] == ["kept-1"]
    switch.unuse(site)
    assert bytes_of(site) == before


def test_the_facade_was_uninstalled_since(site, tmp_path):
    upstream(site)
    before = bytes_of(tmp_path)
    switch.use(site)
    for path in (site / "bitsandbytes", *site.glob("bitsandbytes-*.dist-info")):
        shutil.rmtree(path)
    switch.unuse(site)
    assert bytes_of(tmp_path) == before


def test_an_editable_upstream(site, tmp_path):
    write(tmp_path / "sources", {"bitsandbytes/__init__.py": "__version__ = '0.51.0.dev0'\n"})
    info, path = "bitsandbytes-0.51.0.dev0.dist-info", "__editable__.bitsandbytes-0.51.0.dev0.pth"
    files = {f"{info}/METADATA": "Name: bitsandbytes\nVersion: 0.51.0.dev0\n", path: f"{tmp_path / 'sources'}\n"}
    files[f"{info}/RECORD"] = f"{path},,\n{info}/METADATA,,\n{info}/RECORD,,\n"
    files[f"{info}/direct_url.json"] = json.dumps({"url": "file:///sources", "dir_info": {"editable": True}})
    write(site, files)
    (owner,) = [owner for owner in installed.owners() if owner.site == site]
    assert owner.editable and owner.is_whole and ", editable: upstream" in report._active(owner).text
    before = bytes_of(tmp_path)
    switch.use(site)
    assert installed.FACADE_MARK in version_in(site) and not (site / path).exists()
    switch.unuse(site)
    assert bytes_of(tmp_path) == before


def test_two_owners_are_found_and_refused(site, tmp_path):
    upstream(site)
    upstream(site, "0.48.1", name="bitsandbytes-rocm")
    before = bytes_of(tmp_path)
    with pytest.raises(switch.Mistake, match="own one folder") as refused:
        switch.use(site)
    assert "pip uninstall" in str(refused.value) and "bitsandbytes-rocm 0.48.1" in str(refused.value)
    assert bytes_of(tmp_path) == before
    assert "so one overwrote the other" in report_rows(site)["text"] and "pip uninstall" in report_rows(site)["mend"]


def test_half_removed_ones_are_found(site):
    upstream(site)
    shutil.rmtree(site / "bitsandbytes")
    assert "has lost its package" in report_rows(site)["text"]
    shutil.rmtree(site / "bitsandbytes-0.50.2.dist-info")
    write(site, {"bitsandbytes/nn/leftover.py": ""})
    assert f"rm -r {site / 'bitsandbytes'}" in installed.complaints()[0]
    with pytest.raises(switch.Mistake, match="belongs to no installed distribution"):
        switch.use(site)


def test_without_a_record(site, tmp_path):
    upstream(site, record=False)
    before = bytes_of(tmp_path)
    with pytest.raises(switch.Mistake, match="no RECORD of its files: pip uninstall bitsandbytes"):
        switch.use(site)
    assert bytes_of(tmp_path) == before and not (site / switch.KEPT).exists()


@pytest.mark.parametrize("name", ["use", "unuse"])
def test_a_read_only_environment(site, tmp_path, capsys, name):
    upstream(site)
    if name == "unuse":
        switch.use(site)
    before = bytes_of(tmp_path)
    site.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        status = main.main([name])
    finally:
        if root:
            os.seteuid(0)
    said = capsys.readouterr().err
    assert status == 1 and said.count("\n") == 1 and f"{site} cannot be written, so nothing was changed" in said
    site.chmod(0o755)
    assert bytes_of(tmp_path) == before


def test_two_at_once(site):
    upstream(site)
    with switch._opened(site), pytest.raises(switch.Mistake, match="another process exchanges"):
        switch.use(site)
    assert switch.use(site)["changed"]


def test_a_spoilt_journal(site):
    upstream(site)
    switch.use(site)
    (site / switch.KEPT / "journal.json").write_text('{"phase": "us')
    for call in (switch.use, switch.unuse):
        with pytest.raises(switch.Mistake, match="journal.json cannot be read"):
            call(site)
    assert (site / switch.KEPT / "kept-0" / "bitsandbytes" / "__init__.py").is_file()


def test_an_editable_engine_says_what_to_do(site, monkeypatch, capsys):
    monkeypatch.setattr(installed, "CARRIED", site / "nowhere")
    assert main.main(["use"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("bitshard: this bitshard carries no façade") and said.count("\n") == 1


# ---- environments that see each other: real interpreters, real environments ----


class Environment(NamedTuple):
    """A Python of its own with a folder of installed packages."""

    python: Path
    site: Path

    def __call__(self, code: str, **variables: str) -> subprocess.CompletedProcess:
        env = {"PATH": "", "HOME": str(self.site.parents[3]), **variables}
        command = [str(self.python), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=self.python.parent, timeout=60)

    def bitshard(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
        """The command, as the script that pip writes runs it."""
        return self(f"import sys; from bitshard_cli import main; sys.exit(main.main({list(words)}))", **variables)

    def imports(self, **variables: str) -> tuple[str, Path]:
        """Version and folder of the bitsandbytes that a program here gets."""
        code = "import importlib.metadata as m, importlib.util as u; print(m.version('bitsandbytes'));"
        ran = self(f"{code} print(u.find_spec('bitsandbytes').origin)", **variables)
        version, origin = ran.stdout.splitlines()
        return version, Path(origin).parents[1]


def found_in(python: Path) -> Environment:
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Environment(python, Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()))


def interpreter(prefix: Path) -> Environment:
    """A copy of this Python whose standard library is linked and whose own packages are none."""
    library = Path(sysconfig.get_path("stdlib"))
    own = prefix / "lib" / library.name
    own.mkdir(parents=True)
    (prefix / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), prefix / "bin" / "python3")
    for path in library.iterdir():
        if path.name not in ("site-packages", "dist-packages"):
            (own / path.name).symlink_to(path)
    found = found_in(prefix / "bin" / "python3")
    assert found.site.is_relative_to(prefix)
    found.site.mkdir(parents=True, exist_ok=True)
    return found


def made_by(base: Environment, prefix: Path, *options: str) -> Environment:
    subprocess.run([str(base.python), "-m", "venv", "--without-pip", *options, str(prefix)], check=True, timeout=60)
    return found_in(prefix / "bin" / "python3")


@pytest.fixture
def give_bitshard(facade):
    """give_bitshard(site): bitshard's command there, as its wheel has it."""

    def give(site: Path) -> None:
        source = Path(installed.__file__).parent
        shutil.copytree(source, site / "bitshard_cli", ignore=shutil.ignore_patterns("__pycache__", "facade"))
        shutil.copytree(facade, site / "bitshard_cli" / "facade")

    return give


@pytest.fixture
def base(tmp_path):
    return interpreter(tmp_path / "base")


def sites_of(*environments: Environment) -> dict[str, str]:
    found = {}
    for environment in environments:
        files = bytes_of(environment.site)
        found |= {f"{environment.site}/{name}": text for name, text in files.items() if "__pycache__" not in name}
    return found


@pytest.mark.parametrize("how", ["system", "pth"])
def test_upstream_in_another_environment_stays(base, tmp_path, give_bitshard, how):
    """The façade comes into the environment's own site, first on its path, and nothing of the other one changes."""
    if how == "system":
        other, env = base, made_by(base, tmp_path / "env", "--system-site-packages")
    else:
        other, env = made_by(base, tmp_path / "other"), made_by(base, tmp_path / "env")
        (env.site / "other.pth").write_text(f"{other.site}\n")
    upstream(other.site)
    give_bitshard(env.site)
    assert env.imports() == ("0.50.2", other.site)
    theirs, ours = sites_of(base, other), sites_of(env)
    ran = env.bitshard("use")
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert f"is active in {env.site}\n" in ran.stdout
    assert f"bitsandbytes 0.50.2 in {other.site} is as it was, and no longer imported here" in ran.stdout
    version, place = env.imports()
    assert installed.FACADE_MARK in version and place == env.site
    assert sites_of(base, other) == theirs
    assert "already" in env.bitshard("use").stdout
    assert env.bitshard("unuse").returncode == 0
    assert env.imports() == ("0.50.2", other.site)
    assert sites_of(base, other) == theirs and sites_of(env) == ours


def test_the_user_s_site(base, tmp_path, give_bitshard):
    """bitshard in it: nothing of the interpreter's own is written. Upstream in it: refused, for it comes first."""
    variables = {"PYTHONUSERBASE": str(tmp_path / "user")}
    user = Path(base("import site; print(site.getusersitepackages())", **variables).stdout.strip())
    user.mkdir(parents=True)
    give_bitshard(user)
    upstream(base.site)
    before = sites_of(base)
    assert base.bitshard("use", **variables).returncode == 0
    assert base.imports(**variables)[1] == user and sites_of(base) == before
    assert base.bitshard("unuse", **variables).returncode == 0
    assert base.imports(**variables) == ("0.50.2", base.site)
    shutil.rmtree(user)
    upstream(user, "0.49.0")
    give_bitshard(base.site)
    before = sites_of(base), bytes_of(user)
    ran = base.bitshard("use", **variables)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1, ran.stderr
    assert f"{user} comes first" in ran.stderr and "bitshard run" in ran.stderr
    assert (sites_of(base), bytes_of(user)) == before


@pytest.mark.parametrize("name", ["use", "unuse"])
def test_bitshard_of_another_environment(base, tmp_path, give_bitshard, name):
    """Seen by a .pth file or PYTHONPATH: neither site is changed, whichever has an upstream."""
    other, env = made_by(base, tmp_path / "other"), made_by(base, tmp_path / "env")
    give_bitshard(other.site)
    upstream(other.site)
    if name == "unuse":
        assert other.bitshard("use").returncode == 0
    upstream(env.site, "0.49.0")
    before = sites_of(env, other, base)
    (env.site / "other.pth").write_text(f"{other.site}\n")
    for variables in ({}, {"PYTHONPATH": str(other.site)}):
        ran = env.bitshard(name, **variables)
        assert ran.returncode == 1 and ran.stderr.count("\n") == 1, ran.stderr
        assert f"{other.site}, which is not of this environment" in ran.stderr and "bitshard run" in ran.stderr
    (env.site / "other.pth").unlink()
    assert sites_of(env, other, base) == before


def test_an_upstream_on_pythonpath(base, tmp_path, give_bitshard):
    """It comes before every site, so `use` would change nothing for a program: the report names `bitshard run`, too."""
    give_bitshard(base.site)
    upstream(tmp_path / "target")
    before = bytes_of(tmp_path / "target"), sites_of(base)
    variables = {"PYTHONPATH": str(tmp_path / "target")}
    ran = base.bitshard("use", **variables)
    assert ran.returncode == 1 and f"{tmp_path / 'target'} comes first" in ran.stderr
    code = "from bitshard_cli import report; print(report._exchange())"
    assert base(code, **variables).stdout.startswith("bitshard run ")
    assert base(code).stdout == "bitshard use\n"
    assert (bytes_of(tmp_path / "target"), sites_of(base)) == before


def test_a_folder_that_is_no_environment_s(base, tmp_path, give_bitshard):
    """As `pip install --target` fills it: bitshard and upstream there are exchanged there."""
    target = tmp_path / "target"
    upstream(target)
    give_bitshard(target)
    before = {name: text for name, text in bytes_of(target).items() if "__pycache__" not in name}
    variables = {"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
    assert base.bitshard("use", **variables).returncode == 0
    assert installed.FACADE_MARK in base.imports(**variables)[0] and not sites_of(base)
    assert base.bitshard("unuse", **variables).returncode == 0
    assert {name: text for name, text in bytes_of(target).items() if "__pycache__" not in name} == before


def test_bitshard_was_uninstalled_while_in_use(base, give_bitshard):
    """The façade that stays says so itself when it is imported; so it does where pip has left an empty folder."""
    upstream(base.site)
    give_bitshard(base.site)
    assert base.bitshard("use").returncode == 0
    shutil.rmtree(base.site / "bitshard_cli")
    for leftover in (False, True):
        if leftover:
            (base.site / "bitshard" / "__pycache__").mkdir(parents=True)
        for code in ("import bitsandbytes", "from bitsandbytes.nn import Linear4bit"):
            last = base(code).stderr.splitlines()[-1]
            assert last.startswith("ImportError: ") and "bitshard's" in last and "not installed" in last, last
            assert "install bitshard again" in last and "`bitshard unuse`" in last, last
            assert "pip install --force-reinstall --no-deps bitsandbytes==0.50.2" in last, last
    give_bitshard(base.site)
    assert base.bitshard("unuse").returncode == 0 and base.imports() == ("0.50.2", base.site)


def test_another_fault_of_the_engine_is_shown_as_it_is(tmp_path, facade):
    """Only a missing engine is taken for one."""
    write(tmp_path, {"bitshard/__init__.py": "import torch_of_nobody\n"})
    env = {"PATH": "", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(facade)])}
    command = [sys.executable, "-S", "-c", "import bitsandbytes"]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert "ModuleNotFoundError: No module named 'torch_of_nobody'" in ran.stderr
