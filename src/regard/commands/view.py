"""`regard view`: a model's attention in a browser."""

import threading
import webbrowser
from typing import Annotated

import typer

from regard.commands.common import print_json
from regard.core.extras import needed_for


def view(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A name of `regard models`, a checkpoint folder or a .gguf file. Default: the shipped translator.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="What the model reads first.", show_default=False)
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="Where the page is; others than 127.0.0.1 let other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: any free port.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """Explore a model's attention in a browser: every layer and head, why, and what if it were different."""
    with needed_for("the explorer"):
        from regard.explorer.catalog import catalog
        from regard.explorer.server import Explorer, Place, listen, serving
        from regard.explorer.session import Session

    opened = listen(host, port)
    place = Place(host=host, port=opened.getsockname()[1])
    folders = [] if model is None else [model]
    explorer = Explorer(Session(any_path=place.loopback), place, lambda: catalog(folders))
    url = place.url(explorer.token)
    if as_json:
        print_json({"url": url, "token": explorer.token})
    else:
        print(f"{url}  (Ctrl-C ends it)", flush=True)
    if not no_open:
        threading.Timer(0.5, webbrowser.open, (url,)).start()
    with opened:
        serving(explorer.app()).run(sockets=[opened])
