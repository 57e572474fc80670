"""Processes of one machine meet where no other machine can reach them: torch's launcher listens on all interfaces, and
whoever connects can change what the processes tell each other."""

import argparse
import socket
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import default_config_file
from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

NAME, ADDRESS = "loopback", "127.0.0.1"
TIMEOUT = 600  # seconds, as torch has it


class Loopback(StaticTCPRendezvous):
    """torch's rendezvous of a known number of machines, for one: on any free port of the loopback interface."""

    _store: Store | None

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((self.master_addr, 0))
            self.master_port = listener.getsockname()[1]
            # libuv, torch's default, does not take a socket that listens already.
            taken = {"master_listen_fd": listener.detach(), "use_libuv": False}
            self._store = TCPStore(self.master_addr, self.master_port, 1, True, self.timeout, **taken)
        return super().next_rendezvous()


def create(parameters: RendezvousParameters) -> Loopback:
    return Loopback(ADDRESS, 0, 0, 1, parameters.run_id, TIMEOUT)


def use(given: argparse.Namespace) -> None:
    """given: the options of `accelerate launch`, which also come from its configuration file."""
    file = Path(given.config_file or default_config_file)
    settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    machines = given.num_machines or settings.get("num_machines", 1)
    if machines == 1 and given.rdzv_backend == "static":
        rendezvous_handler_registry.register(NAME, create)
        given.rdzv_backend, given.main_process_port = NAME, 0
