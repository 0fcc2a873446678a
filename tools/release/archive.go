package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// file is a file of an archive. A mode of 0 is 0644.
type file struct {
	name string
	data []byte
	mode int64
}

// pack returns a tar of the files, which are sorted, belong to root and are of that time.
func pack(files []file, at time.Time) ([]byte, error) {
	files = slices.SortedFunc(slices.Values(files), func(a, b file) int { return strings.Compare(a.name, b.name) })
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Size: int64(len(f.data)), Mode: cmp.Or(f.mode, 0o644), ModTime: at, Format: tar.FormatPAX}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), err
}

func compress(files []file, at time.Time) ([]byte, error) {
	archive, err := pack(files, at)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err == nil {
		_, err = w.Write(archive)
	}
	if err != nil {
		return nil, err
	}
	err = w.Close()
	return out.Bytes(), err
}

// readTar returns the regular files of a tar.
func readTar(archive io.Reader) (files []file, err error) {
	for r := tar.NewReader(archive); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return nil, err
		}
		files = append(files, file{header.Name, data, header.Mode & 0o755})
	}
}

// writeFiles writes files below a folder.
func writeFiles(folder string, files []file) error {
	for _, f := range files {
		path := filepath.Join(folder, filepath.FromSlash(f.name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := errors.Join(os.WriteFile(path, f.data, 0o644), os.Chmod(path, 0o644)); err != nil { // whatever the umask is
			return err
		}
	}
	return nil
}

// normalise packs a gzipped tar again, with nothing in it of the machine that made it.
func normalise(archive []byte, at time.Time) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return nil, err
	}
	files, err := readTar(r)
	if err != nil {
		return nil, err
	}
	return compress(files, at)
}

// authorities returns the certificates that Go's authors take from Mozilla, as a file.
func authorities() []byte {
	var out bytes.Buffer
	for root := range bundle.Roots() {
		_ = pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}) // a buffer takes all
	}
	return out.Bytes()
}

// image returns the image of deploy/Dockerfile's target stagemesh.
func (r *release) image(program []byte, licences file, arch string) (v1.Image, error) {
	layer, err := pack([]file{
		{name: "usr/bin/stagemesh", data: program, mode: 0o755},
		{name: "etc/ssl/certs/ca-certificates.crt", data: authorities()},
		{name: "usr/share/licenses/stagemesh/" + licences.name, data: licences.data},
	}, r.at)
	if err != nil {
		return nil, err
	}
	packedLayer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil }, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	made := v1.Time{Time: r.at}
	img := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	img, err = mutate.Append(img, mutate.Addendum{Layer: packedLayer, History: v1.History{Created: made, CreatedBy: "make release"}})
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Architecture, config.OS, config.Created = arch, "linux", made
	config.Config = v1.Config{
		User: "65532:65532", Entrypoint: []string{"/usr/bin/stagemesh"}, Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Labels: map[string]string{
			"org.opencontainers.image.title": "stagemesh", "org.opencontainers.image.version": r.version,
			"org.opencontainers.image.revision": r.commit, "org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
	return mutate.ConfigFile(img, config)
}

// writeImage writes an image as an OCI layout in a tar. With its manifest.json, docker load takes it
// too, also of versions that know no OCI layouts.
func (r *release) writeImage(program []byte, licences file, arch string) error {
	img, err := r.image(program, licences, arch)
	if err != nil {
		return err
	}
	folder := filepath.Join(r.work, "image-"+arch)
	path, err := layout.Write(folder, empty.Index)
	if err != nil {
		return err
	}
	tag := "stagemesh:" + r.version
	names := map[string]string{"org.opencontainers.image.ref.name": r.version, "io.containerd.image.name": "docker.io/library/" + tag}
	if err := path.AppendImage(img, layout.WithAnnotations(names), layout.WithPlatform(v1.Platform{OS: "linux", Architecture: arch})); err != nil {
		return err
	}
	manifest, err := img.Manifest()
	if err != nil {
		return err
	}
	blob := func(hash v1.Hash) string { return "blobs/" + hash.Algorithm + "/" + hash.Hex }
	docker := []map[string]any{{"Config": blob(manifest.Config.Digest), "RepoTags": []string{tag}, "Layers": []string{blob(manifest.Layers[0].Digest)}}}
	text, err := json.Marshal(docker)
	if err != nil {
		return err
	}
	files := []file{{name: "manifest.json", data: text}}
	if err := filepath.WalkDir(folder, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		files = append(files, file{name: filepath.ToSlash(name), data: data})
		return err
	}); err != nil {
		return err
	}
	archive, err := pack(files, r.at)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, fmt.Sprintf("stagemesh_%s_image_linux_%s.tar", r.version, arch)), archive, 0o644)
}
