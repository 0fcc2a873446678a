#!/usr/bin/env bash
# Fetches the viewer that the page /docs shows, from npm, and writes the few files
# of it that are served, packed, with the lock that says what they are. Without
# VERSION it fetches the version of the lock again, and refuses another archive than
# that. No script of the package is run. `make docs-viewer` calls it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/viewer"

read -r package locked integrity <lock
version=${VERSION:-$locked}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

archive=$(cd "$work" && npm pack --silent --ignore-scripts "$package@$version")
got=sha512-$(openssl dgst -sha512 -binary "$work/$archive" | base64 -w0)
if [[ $version == "$locked" && $got != "$integrity" ]]; then
  echo "$package@$version is not the archive of the lock: $got" >&2
  exit 1
fi
tar -xzf "$work/$archive" -C "$work"

echo "$package $version $got" >lock
for file in swagger-ui-bundle.js swagger-ui.css LICENSE NOTICE swagger-ui-bundle.js.LICENSE.txt; do
  (cd "$work/package" && sha256sum "$file") >>lock
  case $file in
    *.js | *.css) gzip -9 -n -c "$work/package/$file" >"$file.gz" ;;
    *) install -m 644 "$work/package/$file" "$file" ;;
  esac
done
echo "internal/openapi/viewer is $package@$version"
