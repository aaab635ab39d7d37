"""The bill of materials of a release: packages as they are installed here, bundled weights, and their training data.

Licences of packages come from their metadata, those of weights and data from the model card.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "src" / "foredraft" / "models"
CARD = MODELS / "MODEL_CARD.md"
NAME = "foredraft"


class Data(NamedTuple):
    """A row of the model card's table of training data."""

    kind: str
    sources: str
    licences: tuple[str, ...]


def training_data() -> list[Data]:
    """The rows of the table with the columns kind, sources and licence."""
    table = CARD.read_text(encoding="utf-8").partition("| kind | sources | licence |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return [Data(kind, sources, tuple(re.split(r", | or ", licence))) for kind, sources, licence in rows]


def weights() -> list[Path]:
    """Files of the bundled models and heads."""
    return sorted(path for path in MODELS.rglob("*") if path.is_file() and path.parent != MODELS)


def licences(found: metadata.PackageMetadata) -> list[str]:
    """Of a package: its licence expression, else its classifiers, else the first line of its licence field."""
    if expression := found.get("License-Expression"):
        return [expression]
    classifiers = [each for each in found.get_all("Classifier") or [] if each.startswith("License ::")]
    if named := [each.rpartition(" :: ")[2] for each in classifiers if each.count("::") > 1]:
        return named
    return [line.strip() for line in (found.get("License") or "").splitlines() if line.strip()][:1]


def required(name: str, extras: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
    """The packages that a package asks for here, and their extras."""
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), requirement.extras


def installed(extras: Iterable[str]) -> dict[str, set[str]]:
    """Names of all packages that foredraft with these extras needs, and what each of them asks for."""
    found: dict[str, set[str]] = {}
    pending = [(NAME, frozenset(extras))]
    seen = set()
    while pending:
        name, wanted = pending.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        own = list(required(name, wanted))
        found.setdefault(name, set()).update(other for other, _ in own)
        pending += [(other, frozenset(more)) for other, more in own]
    return found


def licensed(component: Component, names: Iterable[str]) -> Component:
    factory = LicenseFactory()
    for name in names:
        made = factory.make_from_string(name) if len(name) < 100 else factory.make_with_name(name[:100])
        component.licenses.add(made)
    return component


def package(name: str) -> Component:
    found = metadata.distribution(name)
    url = PackageURL("pypi", name=name, version=found.version)
    component = Component(name=name, version=found.version, purl=url, bom_ref=str(url), type=ComponentType.LIBRARY)
    return licensed(component, licences(found.metadata))


def bundled(path: Path, licence: str) -> Component:
    """A file of a model."""
    name = path.relative_to(MODELS).as_posix()
    digest = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(path.read_bytes()).hexdigest())
    kind = ComponentType.MACHINE_LEARNING_MODEL if path.suffix == ".safetensors" else ComponentType.FILE
    component = Component(name=name, bom_ref=f"models/{name}", type=kind, hashes=[digest])
    component.licenses.add(DisjunctiveLicense(id=licence))
    return component


def bill(extras: Iterable[str]) -> Bom:
    """Everything that a release brings or installs."""
    bom, needs = Bom(), installed(extras)
    packages = {name: package(name) for name in needs}
    own = packages.pop(NAME)
    own.type = ComponentType.APPLICATION
    bom.metadata.component = own
    card = re.search(r"^license: (\S+)$", CARD.read_text(encoding="utf-8"), re.MULTILINE)
    assert card is not None and card[1] == "apache-2.0", "the model card names another licence"
    files = [bundled(path, "Apache-2.0") for path in weights()]
    data = []
    for row in training_data():
        about = f"Training data of the bundled weights ({row.kind}); not part of the package."
        each = Component(name=row.sources, description=about, bom_ref=f"data/{row.sources}", type=ComponentType.DATA)
        for name in row.licences:
            each.licenses.add(DisjunctiveLicense(name=name))
        data.append(each)
    for component in (*packages.values(), *files, *data):
        bom.components.add(component)
    for name, wanted in needs.items():
        component = own if name == NAME else packages[name]
        bom.register_dependency(component, [packages[other] for other in wanted if other in packages])
    bom.register_dependency(own, files)
    for component in files:
        if component.type is ComponentType.MACHINE_LEARNING_MODEL:
            bom.register_dependency(component, data)
    return bom


def main() -> None:
    bom = bill([extra for extra in sys.argv[1].split(",") if extra])
    assert bom.metadata.component is not None
    path = ROOT / "dist" / f"{NAME}-{bom.metadata.component.version}.cdx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n", encoding="utf-8")
    unknown = sorted(component.name for component in bom.components if not component.licenses)
    print(f"Wrote {path.relative_to(ROOT)}: {len(bom.components)} components.")
    if unknown:
        print(f"Their metadata names no licence: {', '.join(unknown)}.")


if __name__ == "__main__":
    main()
