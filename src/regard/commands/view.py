"""`regard view`: a model's attention in a browser, or as one HTML file."""

import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.commands.common import print_json, waiting
from regard.core.extras import needed_for

if TYPE_CHECKING:
    from regard.explorer.subject import Input


def view(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A name of `regard models`, a checkpoint folder or a .gguf file. Default: the shipped translator. "
            "With --lab: the ID of an experiment.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="[TEXT]", help="What the model reads; a translator writes its translation.", show_default=False
        ),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A PNG or JPEG file, for a model of pictures.")
    ] = None,
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="SOURCE TARGET", help="What an encoder-decoder reads, and what it writes."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write one self-contained page instead, and exit.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With --export: all weights, not only thumbnails and the largest.")
    ] = False,
    mechanism: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another mechanism for the model, or FILE.py:NAME, if it is your own."),
    ] = None,
    lab: Annotated[
        bool, typer.Option("--lab", help="Open the lab's page: experiments of `regard lab`, with sliders.")
    ] = False,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="The address to listen on; any but 127.0.0.1 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port of the page; 0: any that is free.")
    ] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address, or what was written, as JSON.")] = False,
) -> None:
    """Explore a model's attention in a browser: every layer and head, why it attends, and what if it did not.

    The page stays on this machine and loads nothing from elsewhere; --export writes it as one file, without a server.
    """
    _check_inputs(text, image, pair, export, full)
    if lab:
        _check_alone({"TEXT": text, "--image": image, "--pair": pair, "--export": export, "--mechanism": mechanism})
        _serve(None, None, None, host, port, no_open, as_json, anchor=_lab_anchor(model))
        return
    from regard.core.mechanisms.text import lookup
    from regard.explorer.catalog import TRANSLATOR, check_name

    if mechanism is not None:
        lookup(mechanism)
    name = model or TRANSLATOR
    if model is not None:
        check_name(model)
    chosen = _input(name, text, image, pair)
    if export is not None:
        _export(name, chosen, export, full, mechanism, as_json)
        return
    _serve(name if model is not None else None, chosen, mechanism, host, port, no_open, as_json)


def _check_inputs(
    text: str | None, image: Path | None, pair: tuple[str, str] | None, export: Path | None, full: bool
) -> None:
    several = [flag for flag, value in (("TEXT", text), ("--image", image), ("--pair", pair)) if value is not None]
    if len(several) > 1:
        raise ValueError(f"text: expected one of TEXT, --image and --pair, got {' and '.join(several)}")
    if full and export is None:
        raise ValueError("full: expected --export as well, got --full alone")
    if image is not None and not image.is_file():
        raise ValueError(f"image: expected a file, got {str(image)!r}")
    if export is not None:
        from regard.explorer.export import check_target

        check_target(export)


def _check_alone(others: dict[str, object]) -> None:
    for flag, value in others.items():
        if value is not None:
            raise ValueError(f"lab: expected it without {flag}, got both")


def _lab_anchor(name: str | None) -> str:
    """The part of the address that opens the lab's page, at an experiment if one is named."""
    if name is None:
        return "#lab"
    from regard.lab.registry import lookup

    return f"#lab/{lookup(name).name}"


def _input(name: str, text: str | None, image: Path | None, pair: tuple[str, str] | None) -> "Input | None":
    """What the model reads first; None for its example."""
    from regard.explorer.catalog import TRANSLATOR, folder_kind
    from regard.explorer.subject import Pair, Picture, Text

    if image is not None:
        return Picture(image.read_bytes())
    if pair is not None:
        return Pair(*pair)
    if text is None:
        return None
    return Pair(text) if name == TRANSLATOR or folder_kind(Path(name)) == "pair" else Text(text)


def _export(name: str, chosen: "Input | None", path: Path, full: bool, mechanism: str | None, as_json: bool) -> None:
    from regard.explorer.catalog import catalog, load_model
    from regard.explorer.export import export
    from regard.explorer.limits import check_size
    from regard.explorer.pictures import picture_by_name, picture_names
    from regard.explorer.session import Session
    from regard.explorer.subject import subject_of

    if chosen is None:
        entry = next((entry for entry in catalog([name]) if entry.name == name), None)
        chosen = None if entry is None else entry.example
        if entry is not None and entry.kind == "image" and picture_names():
            chosen = picture_by_name(picture_names()[0])
    if chosen is None:
        raise ValueError(f"text: expected what {name} reads, TEXT or --image, got none")
    with waiting(f"loading {name}"):
        model = load_model(name, mechanism)
    with waiting("tracing its attention"):
        subject = check_size(subject_of(name, model, chosen))
        snapshot = Session().taken(subject)
        export(snapshot, path, full=full)
    size = path.stat().st_size
    if as_json:
        heads = sum(view.heads for view in snapshot.layers)
        tokens = len(snapshot.subject.tokens)
        print_json({"model": name, "tokens": tokens, "heads": heads, "file": str(path), "bytes": size, "full": full})
        return
    print(f"-> {path}, {size / 2**20:.2f} MB")


def _serve(
    name: str | None,
    chosen: "Input | None",
    mechanism: str | None,
    host: str,
    port: int,
    no_open: bool,
    as_json: bool,
    anchor: str = "",
) -> None:
    with needed_for("the explorer"):
        from regard.explorer.catalog import catalog
        from regard.explorer.guard import Place
        from regard.explorer.server import Explorer, listen, serving
        from regard.explorer.session import Session

    opened = listen(host, port)
    with opened:
        place = Place(host=host, port=opened.getsockname()[1])
        folders = [] if name is None else [name]
        session = Session(mechanism=mechanism, folders=folders, any_path=place.loopback)
        explorer = Explorer(session, place, lambda: catalog(folders))
        explorer.start = _start(name, chosen)
        url = place.url(explorer.token) + anchor
        if as_json:
            print_json({"url": url, "token": explorer.token})
        else:
            print(f"{url}  (Ctrl-C ends it)", flush=True)
        if not no_open:
            threading.Timer(0.5, webbrowser.open, (url,)).start()
        try:
            serving(explorer.app()).run(sockets=[opened])
        finally:
            explorer.close()


def _start(name: str | None, chosen: "Input | None") -> dict[str, Any]:
    """What the page begins with, as JSON."""
    from regard.explorer.catalog import TRANSLATOR
    from regard.explorer.requests import input_json

    if name is None and chosen is None:
        return {}
    return {"model": name or TRANSLATOR} | ({} if chosen is None else {"input": input_json(chosen)})
