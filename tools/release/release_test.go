package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

const changelog = `# Changelog

## Unreleased

- next

## v0.2.0 (2026-12-01)

- second

## v0.1.0 (2026-11-01)

- first
`

func TestNotesAreTheSectionOfTheVersion(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{"v0.1.0": "- first\n", "v0.2.0": "- second\n", "v0.3.0": "- next\n"} {
		if got, isReleased := notesOf(changelog, version); got != want || isReleased != (version != "v0.3.0") {
			t.Errorf("%s: %q, %t", version, got, isReleased)
		}
	}
}

func TestVersionsAreSemantic(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]bool{"v0.1.0": true, "v1.2.3-rc.1": true, "0.1.0": false, "v1.2": false, "v01.2.3": false, "": false} {
		if versionPattern.MatchString(version) != want {
			t.Errorf("%q: want %t", version, want)
		}
	}
}

// The order and the times of the files do not matter.
func TestArchivesDependOnTheirFilesAlone(t *testing.T) {
	t.Parallel()
	at := time.Unix(1_700_000_000, 0)
	a, b := file{name: "a/x", data: []byte("x"), mode: 0o755}, file{name: "b", data: []byte("y")}
	first, err := compress([]file{a, b}, at)
	if err != nil {
		t.Fatal(err)
	}
	other, err := compress([]file{b, a}, at.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(first, other) {
		t.Error("the time of the commit is not in the archive")
	}
	again, err := normalise(other, at)
	if err != nil || !bytes.Equal(first, again) {
		t.Errorf("the archives differ: %v", err)
	}
}

func TestImagesAreValidAndReproducible(t *testing.T) {
	t.Parallel()
	var images [2][]byte
	for i := range images {
		r := release{version: "v0.1.0", commit: "abc", at: time.Unix(1_700_000_000, 0), out: t.TempDir(), work: t.TempDir()}
		if err := r.writeImage([]byte("program"), file{name: "LICENSES", data: []byte("all")}, "arm64"); err != nil {
			t.Fatal(err)
		}
		var err error
		if images[i], err = os.ReadFile(filepath.Join(r.out, "stagemesh_v0.1.0_image_linux_arm64.tar")); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("two runs differ")
	}
	files, err := readTar(bytes.NewReader(images[0]))
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	if err := writeFiles(folder, files); err != nil {
		t.Fatal(err)
	}
	path, err := layout.FromPath(folder)
	if err != nil {
		t.Fatal(err)
	}
	index, err := path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 || manifest.Manifests[0].Platform.Architecture != "arm64" {
		t.Fatalf("the index has %+v, %v", manifest, err)
	}
	img, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil || config.Config.User != "65532:65532" || config.Config.Entrypoint[0] != "/usr/bin/stagemesh" || config.Config.Labels["org.opencontainers.image.version"] != "v0.1.0" {
		t.Errorf("the configuration is %+v, %v", config, err)
	}
	// Docker's own form names the same blobs.
	text := ""
	for _, f := range files {
		if f.name == "manifest.json" {
			text = string(f.data)
		}
	}
	for _, f := range files {
		if strings.HasPrefix(f.name, "blobs/") && !strings.Contains(text, f.name) && f.name != "blobs/sha256/"+manifest.Manifests[0].Digest.Hex {
			t.Errorf("%s is not in %s", f.name, text)
		}
	}
}

func TestPackagesHaveTheVersionOfTheRelease(t *testing.T) {
	t.Parallel()
	r := release{version: "v1.2.3-rc.1"}
	edited := func(path, name string, edit func(file) file) string {
		data, err := os.ReadFile(filepath.Join("../..", path, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(edit(file{name: name, data: data}).data)
	}
	if chart := edited("deploy/helm/stagemesh", "Chart.yaml", r.chartFile); !strings.Contains(chart, "\nversion: 1.2.3-rc.1\n") || !strings.Contains(chart, "\nappVersion: v1.2.3-rc.1\n") {
		t.Errorf("the chart is\n%s", chart)
	}
	if npm := edited("sdk/typescript", "package.json", r.typeScriptFile); strings.Count(npm, `"version": "1.2.3-rc.1"`) != 1 {
		t.Errorf("package.json is\n%s", npm)
	}
	for name, want := range map[string]bool{"dist/index.js": true, "README.md": true, "LICENSE": true, "src/index.ts": false, "package-lock.json": false, ".npmrc": false} {
		if got := r.typeScriptFile(file{name: name}).name != ""; got != want {
			t.Errorf("%s is packed: %t", name, got)
		}
	}
}

// Its alerts and dashboards are links to files of the local stack.
func TestChartIsPackedWithWhatItsLinksLeadTo(t *testing.T) {
	t.Parallel()
	r := release{version: "v0.1.0", out: t.TempDir()}
	if err := r.writePackage(t.Context(), "../../deploy/helm/stagemesh", "stagemesh", "chart.tgz", r.chartFile); err != nil {
		t.Fatal(err)
	}
	archive, err := os.Open(filepath.Join(r.out, "chart.tgz"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	unzipped, err := gzip.NewReader(archive)
	if err != nil {
		t.Fatal(err)
	}
	files, err := readTar(unzipped)
	if err != nil {
		t.Fatal(err)
	}
	sizes := map[string]int{}
	for _, f := range files {
		sizes[f.name] = len(f.data)
	}
	for _, name := range []string{"stagemesh/Chart.yaml", "stagemesh/values.schema.json", "stagemesh/files/alerts.yml", "stagemesh/files/dashboards/mesh.json"} {
		if sizes[name] == 0 {
			t.Errorf("%s is not there: %v", name, sizes)
		}
	}
}

func TestAuthoritiesAreThere(t *testing.T) {
	t.Parallel()
	if n := bytes.Count(authorities(), []byte("BEGIN CERTIFICATE")); n < 100 {
		t.Errorf("the image has %d certificates", n)
	}
}

func TestTarIsReadWithoutWhatIsNoFile(t *testing.T) {
	t.Parallel()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "link", Linkname: "/etc/passwd"}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if files, err := readTar(&archive); err != nil || len(files) > 0 {
		t.Errorf("got %v, %v", files, err)
	}
}
