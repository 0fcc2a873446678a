package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// registry is the host in the names of images. No image is pulled.
const registry = "stagemesh.test"

// Images of stagemesh are equal but for their tags and labels.
const (
	imagePause     = registry + "/pause:test"
	imageCoreDNS   = registry + "/coredns:test"
	imageNATS      = registry + "/nats:test"
	imageStagemesh = registry + "/stagemesh"
	firstTag       = "first"
	secondTag      = "second"
)

// loadImages imports an image for each program, made as deploy/Dockerfile makes them: a static
// program, which is the entry point, and a numeric user.
func (c *cluster) loadImages(ctx context.Context, n *node) error {
	for _, image := range []struct{ tag, program, target string }{
		{imagePause, "pause", "/pause"},
		{imageCoreDNS, "coredns", "/coredns"},
		{imageNATS, "nats", "/usr/local/bin/nats-server"},
		{imageStagemesh + ":" + firstTag, "stagemesh", "/usr/bin/stagemesh"},
		{imageStagemesh + ":" + secondTag, "stagemesh", "/usr/bin/stagemesh"},
	} {
		archive := filepath.Join(folder, "image.tar")
		if err := writeImage(archive, image.tag, c.programs[image.program], image.target); err != nil {
			return fmt.Errorf("image %s: %w", image.tag, err)
		}
		cmd := exec.CommandContext(ctx, "ctr", "--address", n.folder()+"/containerd.sock", "--namespace", "k8s.io", "images", "import", archive)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("ctr images import of %s: %w\n%s", image.tag, err, out)
		}
		if err := os.Remove(archive); err != nil {
			return err
		}
	}
	return nil
}

func writeImage(archive, tag, program, target string) error {
	data, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	var files bytes.Buffer
	w := tar.NewWriter(&files)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(target, "/"), Mode: 0o755, Size: int64(len(data))}); err != nil {
		return err
	}
	if _, err := w.Write(data); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, static.NewLayer(files.Bytes(), types.DockerUncompressedLayer))
	if err != nil {
		return err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{User: "65532:65532", Entrypoint: []string{target}, Labels: map[string]string{"org.opencontainers.image.version": tag}}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return err
	}
	named, err := name.NewTag(tag)
	if err != nil {
		return err
	}
	return tarball.WriteToFile(archive, named, image)
}
