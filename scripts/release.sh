#!/usr/bin/env bash
# Checks, builds and tags a release:
#   scripts/release.sh [--dry-run]
# The tree must be clean, and the newest section of CHANGELOG.md must be that of quackish/_version.py. The packages are
# checked, and the wheel is installed into a new environment, where it must work. --dry-run does not tag. Nothing is
# pushed or uploaded: the last lines say how. Packages go to out/release/.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "release.sh: $*" >&2; exit 1; }
case "${1-}" in
    "") dry_run= ;;
    --dry-run) dry_run=1 ;;
    *) fail "unknown argument '$1'; expected nothing or --dry-run" ;;
esac
python=$(command -v python3 || command -v python)

changed=$(git status --porcelain)
[ -z "$changed" ] || fail "the tree is not clean; commit or remove:"$'\n'"$changed"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' quackish/_version.py)
heading=$(grep -m 1 '^## ' CHANGELOG.md)
[[ "$heading" =~ ^"## $version ("[0-9]{4}-[0-9]{2}-[0-9]{2}")"$ ]] ||
    fail "CHANGELOG.md begins with '$heading'; expected '## $version ($(date +%F))', the version of quackish/_version.py"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null ||
    fail "the tag v$version exists; expected a new version in quackish/_version.py and CHANGELOG.md"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf out/release
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check build twine
"$work/tools/bin/python" -m build --outdir out/release .
"$work/tools/bin/python" -m twine check --strict out/release/*
wheel=(out/release/*.whl)

# Links that lead nowhere outside of the repository.
"$python" - "${wheel[0]}" <<'PYTHON'
import re, sys, zipfile

wheel = zipfile.ZipFile(sys.argv[1])
(metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
text = wheel.read(metadata).decode()
links = [*re.findall(r"\]\(([^)\s]+)", text), *re.findall(r'\b(?:src|srcset|href)="([^"]+)"', text)]
relative = [link for link in links if not link.startswith(("https://", "http://", "mailto:"))]
if relative:
    raise SystemExit(f"release.sh: the package's README has relative links: {relative}; see pyproject.toml")
PYTHON

echo "+ the wheel in a new environment"
"$python" -m venv "$work/user"
"$work/user/bin/python" -m pip install --quiet --disable-pip-version-check "${wheel[0]}"
cp scripts/smoke_test.py "$work"
(cd "$work" && user/bin/python smoke_test.py "$version" && user/bin/quackish --version &&
    user/bin/python -m quackish explain rms_norm 16384x4096 --gpu h200 >/dev/null)

[ -z "$dry_run" ] || { echo "v$version is ready: out/release/"; exit; }
git tag -a "v$version" -m "quackish $version"
echo "Tagged v$version. To publish it:"
echo "    git push origin v$version"
echo "    python -m twine upload out/release/*"
