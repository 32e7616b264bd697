"""``cluster.yaml``: machines one does not have: devices of the catalogue, of the profile, or with figures of one's own.

    halopipe: cluster
    version: 1
    measured-on: {device: EPYC-7763-core, memory-bandwidth: 20GB/s}      # what the profile was measured on
    hosts:
      - name: n                            # two hosts, n0 and n1
        count: 2
        devices:
          - {device: V100-16GB, count: 4, memory: 15GiB}     # gpu0 ... gpu3 of each; memory in place of the catalogue's
      - name: big
        devices:
          - {name: my-gpu, memory: 24GiB, memory-bandwidth: 936GB/s, peak: {float32: 35.6TFLOP/s}}
    links:
      within-host: NVLink-2                # a name of the catalogue; "measured": the profile's own
      across-hosts: {link: Ethernet-10G, latency: 30us}      # or {bandwidth: 1.25GB/s, latency: 30us, burst: 64KiB}
      pairs:                                                 # what is joined otherwise, one way each
        - {from: n0, to: n1, bandwidth: 125MB/s, latency: 50us}

Links are stated by tier (:mod:`planner.ir.cluster`).  Where machines are more than hosts, the file says which tiers
there are, innermost first, and which groups hosts and devices are in: by name, or by their number.

    tiers:
      - {name: nvlink, within: island}
      - {name: within-host, within: host}
      - {name: within-rack, within: rack}
      - {name: across-racks}               # the last one joins everything
    hosts:
      - name: n
        count: 4
        groups: {rack: 2}                  # n0 and n1 in rack0, n2 and n3 in rack1
        devices:
          - {device: V100-16GB, count: 4, groups: {island: 2}}   # gpu0 and gpu1 in island0 of their host, ...

A board may have two memories: parameters are on chip where those of the device fit.  Devices of the family ``fpga``
stream (:class:`planner.ir.cluster.DeviceSpec`).

      - {name: my-board, family: fpga, memory: 8GiB, memory-bandwidth: 38GB/s, on-chip-memory: 40MB,
         peak: {float32: 1TFLOP/s}}

With ``measured-on`` the share of its roof that each layer reached is carried over.  It is a name of the catalogue,
figures like those of ``my-gpu``, or, for a profile of several kinds of device, a mapping of those by kind; kinds that
are called like a device of the catalogue are that device.  A link without a latency has none: the catalogue knows none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.extras.catalogue.listing import FIGURES, STREAMING, DeviceEntry, device, devices, link, links, names_of
from planner.extras.catalogue.reading import ABSENT, FieldReader
from planner.ir.cluster import DATASHEET, HOST, HOST_TIERS, Cluster, DeviceSpec, Link, PairLink, Tier
from planner.ir.files import read_text
from planner.ir.quantities import BYTES, BYTES_PER_S, FLOP_PER_S, SECONDS
from planner.ir.strict_yaml import MOST_YAML_BYTES, cut, parse_yaml, shown
from planner.ir.validation import MOST_DEVICES, nesting_faults

_MEASURED = "measured"
_PAIRS = "pairs"
_LINK = ("link", "bandwidth", "latency", "duplex", "burst")
_FIGURES = (*FIGURES, "peak")
_NO_CLUSTER = Cluster((), {})


@dataclass(frozen=True, slots=True)
class Machines:
    """What a cluster file describes.

    Attributes:
        measured_on: figures of the devices that the profile was measured on, by their kind in the profile.
    """

    cluster: Cluster
    measured_on: Mapping[str, DeviceSpec] = field(default_factory=dict)


def read_machines(path: str | Path, own: Cluster = _NO_CLUSTER) -> Machines:
    """The machines that the file at ``path`` describes.

    Args:
        own: the cluster that a profile was measured on; its kinds of device and its links can be named too.

    Raises:
        MissingFileError, CorruptFileError: the file cannot be read, or is wrong; all its faults are named, each unknown
            name with the nearest that is known.
    """
    return machines_of(read_text(path, MOST_YAML_BYTES), own, str(path))


def machines_of(text: str, own: Cluster = _NO_CLUSTER, source: str = "text") -> Machines:
    """As :func:`read_machines`, of text."""
    parser = _Machines(FieldReader(), own)
    machines = parser.read(parse_yaml(text, source))
    parser.reader.finish(source, "cluster file")
    return machines


@dataclass(slots=True)
class _Machines:
    """Reads one cluster file."""

    reader: FieldReader
    own: Cluster
    tiers: tuple[Tier, ...] = HOST_TIERS

    def read(self, root: Any) -> Machines:
        if isinstance(root, dict) and root.get("halopipe", "cluster") != "cluster":
            what = f"it is a halopipe {cut(str(root['halopipe']))} file"
            self.reader.fault("", f"{what}; a cluster file has 'halopipe: cluster'")
            return Machines(_NO_CLUSTER)
        node = self.reader.mapping(root, "", ("halopipe", "version", "hosts", "links"), ("measured-on", "tiers"))
        if node["halopipe"] not in ("cluster", ABSENT) or node["version"] not in (1, ABSENT):
            self.reader.fault("", "should begin with 'halopipe: cluster' and 'version: 1'")
        if "tiers" in node:
            self.tiers = self._tiers(node["tiers"])
            if not self.tiers:
                return Machines(_NO_CLUSTER)
        if (num_devices := _num_devices(node["hosts"])) > MOST_DEVICES:
            self.reader.fault("hosts", f"{num_devices} devices; {MOST_DEVICES} are the most")
            return Machines(_NO_CLUSTER)
        specs = tuple(self._hosts(node["hosts"]))
        measured_on = self._measured_on(node["measured-on"]) if "measured-on" in node else {}
        return Machines(self._cluster(specs, node["links"]), {**self._by_name(), **measured_on})

    def _tiers(self, value: Any) -> tuple[Tier, ...]:
        tiers = []
        for path, entry in self.reader.items(value, "tiers"):
            node = self.reader.mapping(entry, path, ("name",), ("within",))
            level = self.reader.text(node["within"], f"{path}.within") if "within" in node else ""
            tiers.append(Tier(self.reader.text(node["name"], f"{path}.name"), level))
        for what, names in (("name", [tier.name for tier in tiers]), ("within", [tier.within for tier in tiers])):
            for name in sorted(name for name, count in Counter(names).items() if name and count > 1):
                self.reader.fault("tiers", f"two tiers have the {what} {name!r}")
        levels = [tier.within for tier in tiers]
        if HOST not in levels or "" in levels[:-1] or levels[-1:] != [""]:
            self.reader.fault("tiers", "one should be within: host, and the last one, and no other, within nothing")
            return ()
        return tuple(tiers)

    def _hosts(self, value: Any) -> Iterator[DeviceSpec]:
        names: list[str] = []
        levels = [tier.within for tier in self.tiers[:-1]]
        smaller = levels[: levels.index(HOST)]
        larger = levels[levels.index(HOST) + 1 :]
        hosts_in = Counter[str]()
        for path, entry in self.reader.items(value, "hosts"):
            node = self.reader.mapping(entry, path, ("name", "devices"), ("count", "groups"))
            name = self.reader.text(node["name"], f"{path}.name")
            count = self.reader.count(node["count"], f"{path}.count") if "count" in node else 0
            hosts = [f"{name}{number}" for number in range(count)] if count else [name]
            names += hosts
            around = self._groups(node.get("groups", {}), f"{path}.groups", larger, len(hosts), hosts_in)
            kinds = list(self._devices(node["devices"], f"{path}.devices", smaller))
            for host, outside in zip(hosts, around, strict=True):
                numbers: dict[str, int] = {}
                for spec, family in kinds:
                    number = numbers[family] = numbers.get(family, -1) + 1
                    groups = {**{level: f"{host}/{group}" for level, group in spec.groups.items()}, **outside}
                    yield replace(spec, name=f"{host}/{family}{number}", host=host, groups=groups)
        for name in sorted(name for name, count in Counter(names).items() if count > 1):
            self.reader.fault("hosts", f"two hosts are called {name!r}")

    def _groups(
        self, value: Any, path: str, levels: list[str], count: int, numbers: Counter[str]
    ) -> list[dict[str, str]]:
        """The groups of each of ``count`` hosts or devices: of one name, or numbered, by the size of a group.

        Args:
            numbers: of groups by level that were numbered before.
        """
        groups: list[dict[str, str]] = [{} for _ in range(count)]
        for level, group in self.reader.mapping(value, path, (), levels).items():
            if isinstance(group, str):
                names = [self.reader.text(group, f"{path}.{level}")] * count
            else:
                size = self.reader.count(group, f"{path}.{level}")
                names = [f"{level}{numbers[level] + index // size}" for index in range(count)]
                numbers[level] += -(-count // size)
            for each, name in zip(groups, names, strict=True):
                each[level] = name
        return groups

    def _devices(self, value: Any, path: str, levels: list[str]) -> Iterator[tuple[DeviceSpec, str]]:
        """The devices of a host, without names yet, and the word to name each with."""
        numbers = Counter[str]()
        for where, entry in self.reader.items(value, path):
            node = {"device": entry} if isinstance(entry, str) else entry
            spec, family = self._device(node, where, ("count", "groups"))
            if spec.memory_bytes <= 0:
                self.reader.fault(f"{where}.memory", f"missing: no source says how much memory {spec.kind} has")
            count = self.reader.count(node["count"], f"{where}.count") if _has(node, "count") else 1
            groups = node["groups"] if _has(node, "groups") else {}
            for of_one in self._groups(groups, f"{where}.groups", levels, count, numbers):
                yield replace(spec, groups=of_one), family

    def _device(self, value: Any, path: str, more: tuple[str, ...] = ()) -> tuple[DeviceSpec, str]:
        """A device by its name, or by figures; figures beside a name take the place of the catalogue's."""
        if _has(value, "name"):
            node = self.reader.mapping(value, path, ("name",), (*_FIGURES, "family", *more))
            family = self.reader.text(node.get("family", "gpu"), f"{path}.family")
            kind = self.reader.text(node["name"], f"{path}.name")
            base = DeviceSpec("", kind, "", 0, streams=family in STREAMING)
            return self._with_figures(base, node, path), family
        node = self.reader.mapping(value, path, ("device",), (*_FIGURES, *more))
        base, family = self._known(self.reader.text(node["device"], f"{path}.device"), f"{path}.device")
        changed = [key for key in ("memory-bandwidth", "on-chip-memory", "on-chip-bandwidth", "peak") if key in node]
        spec = self._with_figures(base, node, path)
        return replace(spec, kind=f"{spec.kind} ({_changes(node)})") if changed else spec, family

    def _known(self, name: str, path: str) -> tuple[DeviceSpec, str]:
        """A kind of the profile, or a device of the catalogue."""
        for spec in self.own.devices:
            if spec.kind == name:
                return spec, spec.name.rpartition("/")[2].rstrip("0123456789") or "cpu"
        catalogue_names = names_of(devices().values())
        if name.lower() not in catalogue_names:
            if name:
                kinds = [spec.kind for spec in self.own.devices]
                self.reader.fault(path, f"no device {shown(name)}", name, [*catalogue_names.values(), *kinds])
            return DeviceSpec("", name, "", 1), "gpu"
        entry = device(name)
        return _spec(entry), entry.family

    def _with_figures(self, spec: DeviceSpec, node: Mapping[str, Any], path: str) -> DeviceSpec:
        if "memory" in node:
            spec = replace(spec, memory_bytes=int(self.reader.quantity(node["memory"], f"{path}.memory", BYTES)))
        if "on-chip-memory" in node:
            size = self.reader.quantity(node["on-chip-memory"], f"{path}.on-chip-memory", BYTES)
            spec = replace(spec, on_chip_bytes=int(size))
        if "memory-bandwidth" in node:
            spec = replace(spec, memory_bytes_per_s=self._rate(node, path, "memory-bandwidth"))
        if "on-chip-bandwidth" in node:
            spec = replace(spec, on_chip_bytes_per_s=self._rate(node, path, "on-chip-bandwidth"))
        if "peak" in node:
            peak = self.reader.mapping(node["peak"], f"{path}.peak", (), tuple(map(str, _keys(node["peak"]))))
            peaks = {
                dtype: self.reader.quantity(value, f"{path}.peak.{dtype}", FLOP_PER_S) for dtype, value in peak.items()
            }
            spec = replace(spec, peak_flop_per_s={**spec.peak_flop_per_s, **peaks})
        return spec

    def _rate(self, node: Mapping[str, Any], path: str, key: str) -> float:
        return self.reader.quantity(node[key], f"{path}.{key}", BYTES_PER_S)

    def _by_name(self) -> dict[str, DeviceSpec]:
        """Kinds of the profile that the catalogue knows by that name."""
        catalogue_names = names_of(devices().values())
        kinds = [spec.kind for spec in self.own.devices if spec.kind.lower() in catalogue_names]
        return {kind: _spec(device(kind)) for kind in kinds}

    def _measured_on(self, value: Any) -> dict[str, DeviceSpec]:
        kinds = list(dict.fromkeys(spec.kind for spec in self.own.devices))
        by_kind = value if isinstance(value, Mapping) and not {"device", "name"} & set(value) else None
        if by_kind is None and len(kinds) > 1:
            self.reader.fault("measured-on", f"should say it for each kind of the profile: {', '.join(kinds)}")
            return {}
        specs = {}
        for kind, entry in (by_kind if by_kind is not None else dict.fromkeys(kinds[:1], value)).items():
            path = f"measured-on.{kind}" if by_kind is not None else "measured-on"
            if kinds and kind not in kinds:
                self.reader.fault(path, f"the profile has no kind {shown(kind)}", kind, kinds)
                continue
            node = {"device": entry} if isinstance(entry, str) else entry
            specs[str(kind)] = self._device(node, path)[0]
        return specs

    def _cluster(self, specs: tuple[DeviceSpec, ...], value: Any) -> Cluster:
        node = self.reader.mapping(value, "links", (), (*(tier.name for tier in self.tiers), _PAIRS))
        apart = tuple(self._pairs(node.pop(_PAIRS), {spec.host for spec in specs})) if _PAIRS in node else ()
        bare = Cluster(specs, {}, tiers=() if self.tiers == HOST_TIERS else self.tiers)
        if any(spec.groups for spec in specs):
            for _, what in nesting_faults(bare):
                self.reader.fault("hosts", what)
        levels = {tier.name: tier.within for tier in self.tiers}
        for name in bare.tiers_used():
            if name not in node:
                ends = f"of one {levels[name]}" if levels[name] else f"of several {self.tiers[-2].within}s"
                what = f"missing: devices {ends} use it; name one of the catalogue, such as Ethernet-10G"
                self.reader.fault(f"links.{name}", what)
        tier_links = {name: self._link(name, entry) for name, entry in node.items()}
        measured = {name for name, entry in node.items() if entry == _MEASURED}
        collectives = tuple(each for each in self.own.collectives if each.link in measured)
        stated = {(pair.src_host, pair.dst_host) for pair in apart}
        hosts = {spec.host for spec in specs}
        apart += tuple(
            pair
            for pair in self.own.pairs
            if self.own.pair_tier(pair) in measured
            and {pair.src_host, pair.dst_host} <= hosts
            and (pair.src_host, pair.dst_host) not in stated
        )
        return replace(bare, links=tier_links, collectives=collectives, pairs=apart)

    def _pairs(self, value: Any, hosts: set[str]) -> Iterator[PairLink]:
        """Links from one host to another that are not as their class."""
        for path, entry in self.reader.items(value, f"links.{_PAIRS}"):
            node = dict(self.reader.mapping(entry, path, ("from", "to"), _LINK))
            src, dst = (self.reader.text(node.pop(key), f"{path}.{key}") for key in ("from", "to"))
            for key, host in (("from", src), ("to", dst)):
                if host and host not in hosts:
                    self.reader.fault(f"{path}.{key}", f"no host {shown(host)}", host, hosts)
            yield PairLink(src, dst, self._described(node, path))

    def _link(self, name: str, value: Any) -> Link:
        path = f"links.{name}"
        if value == _MEASURED:
            if name not in self.own.links:
                self.reader.fault(path, f"the profile measured no link {name}")
            return self.own.links.get(name, Link(0.0, 1.0))
        node = {"link": value} if isinstance(value, str) else value
        return self._described(self.reader.mapping(node, path, (), _LINK), path)

    def _described(self, node: Mapping[str, Any], path: str) -> Link:
        latency_s = 0.0
        bandwidth = 0.0
        if "link" in node:
            latency_s, bandwidth = self._known_link(self.reader.text(node["link"], f"{path}.link"), path)
        if "bandwidth" in node:
            bandwidth = self.reader.quantity(node["bandwidth"], f"{path}.bandwidth", BYTES_PER_S)
        if "latency" in node:
            latency_s = self.reader.quantity(node["latency"], f"{path}.latency", SECONDS)
        if not bandwidth:
            self.reader.fault(f"{path}.bandwidth", "missing: name a link of the catalogue, or give its bandwidth")
        duplex = node.get("duplex", True)
        if not isinstance(duplex, bool):
            self.reader.fault(f"{path}.duplex", f"should be true or false, got {shown(duplex)}")
        burst = self.reader.quantity(node["burst"], f"{path}.burst", BYTES) if "burst" in node else 0
        return Link(latency_s, bandwidth or 1.0, (), duplex is not False, DATASHEET, int(burst))

    def _known_link(self, name: str, path: str) -> tuple[float, float]:
        catalogue_names = names_of(links().values())
        if name.lower() not in catalogue_names:
            self.reader.fault(path, f"no link {shown(name)}", name, catalogue_names.values())
            return 0.0, 1.0
        entry = link(name)
        return entry.latency_s.value if entry.latency_s is not None else 0.0, entry.bandwidth_bytes_per_s.value


def _spec(entry: DeviceEntry) -> DeviceSpec:
    peak = {dtype: figure.value for dtype, figure in entry.peak_flop_per_s.items()}
    memory = int(entry.memory_bytes.value) if entry.memory_bytes is not None else 0
    per_s, on_chip_per_s = (
        None if figure is None else figure.value for figure in (entry.memory_bytes_per_s, entry.on_chip_bytes_per_s)
    )
    on_chip = int(entry.on_chip_bytes.value) if entry.on_chip_bytes is not None else 0
    return DeviceSpec(
        "",
        entry.name,
        "",
        memory,
        peak,
        per_s,
        streams=entry.family in STREAMING,
        on_chip_bytes=on_chip,
        on_chip_bytes_per_s=on_chip_per_s,
    )


def _num_devices(hosts: Any) -> int:
    """How many devices the hosts of a file come to, before one is made; a wrong count is 1, and refused later."""

    def count(entry: Any) -> int:
        number = entry.get("count", 1) if isinstance(entry, Mapping) else 1
        return number if isinstance(number, int) and 0 < number <= MOST_DEVICES else 1

    def listed(entries: Any) -> list[Any]:
        return entries if isinstance(entries, list) else []

    return sum(
        count(host) * max(1, sum(map(count, listed(host.get("devices") if isinstance(host, Mapping) else None))))
        for host in listed(hosts)
    )


def _has(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and key in value


def _keys(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Mapping) else ()


def _changes(node: Mapping[str, Any]) -> str:
    """What was given in place of the catalogue's, as the name of a kind of its own: costs depend on it."""
    parts = (
        [f"{dtype} {value}" for dtype, value in node["peak"].items()]
        if _has(node, "peak") and _keys(node["peak"])
        else []
    )
    labels = {"memory-bandwidth": "memory at", "on-chip-memory": "on chip", "on-chip-bandwidth": "on chip at"}
    return ", ".join([*parts, *(f"{word} {node[key]}" for key, word in labels.items() if key in node)])
