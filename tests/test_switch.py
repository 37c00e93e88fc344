"""`bitshard use`, `unuse` and `report` on folders of installed packages: what is exchanged, put back, and said."""

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

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
    monkeypatch.setattr(switch, "site_of", lambda found: folder)  # never those of the Python that runs the tests
    monkeypatch.setattr(sys, "path", [str(folder), *(path for path in sys.path if "site-packages" not in path)])
    return folder


def test_the_folder_is_that_of_the_imported_one(tmp_path):
    owner = installed.Owner("bitsandbytes", "0.50.2", tmp_path, tmp_path / "info", [], False)
    assert switch.site_of([owner, owner._replace(site=tmp_path / "later")]) == tmp_path
    assert switch.site_of([]) == Path(sysconfig.get_path("purelib"))


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
