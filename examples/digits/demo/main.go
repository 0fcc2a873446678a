// Command demo runs the digits mesh in this process, sends it the example
// images through its public API, prints what it reads in them, and keeps
// serving until it is stopped.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/services/local"
	"github.com/stagemesh/stagemesh/services/logflags"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/services/stagemesh"
)

func main() {
	once := flag.Bool("once", false, "exit after the table; non-zero if a request failed")
	listen := flag.String("listen", meshfile.DefaultListen, "the gateway's address")
	ops := flag.String("ops", meshfile.DefaultOps, "the operations address")
	level := flag.String("log-level", "warn", "debug, info, warn or error")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Stdout, options{once: *once, listen: *listen, ops: *ops, level: *level})
	if err != nil {
		fmt.Fprintln(os.Stderr, "digits:", err)
		os.Exit(1)
	}
}

type options struct {
	once               bool
	listen, ops, level string
}

var (
	// errDone ends the mesh after the table.
	errDone = errors.New("done")
	// errEarly is the end before it.
	errEarly = errors.New("stopped before all images were read")
)

func run(ctx context.Context, out io.Writer, o options) error {
	folder, err := os.MkdirTemp("", "digits-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder) //nolint:errcheck // what stays behind is in the system's folder for such things
	if err := os.CopyFS(folder, digits.FS); err != nil {
		return err
	}
	file, err := meshfile.Load(filepath.Join(folder, "mesh.yaml"), runners.All()...)
	if err != nil {
		return err
	}
	file.Gateway.Listen, file.Ops.Listen = o.listen, o.ops
	log, err := logflags.Flags{Level: o.level, Format: "text"}.Logger(os.Stderr)
	if err != nil {
		return err
	}
	err = stagemesh.Up(ctx, stagemesh.Run{File: file, Logger: log, Ready: func(m *local.Mesh, _ net.Addr) error {
		if err := show(ctx, out, "http://"+m.Addr().String()); err != nil {
			return err
		}
		if o.once {
			return errDone
		}
		_, err := fmt.Fprintln(out, "The mesh keeps serving; stop it with Ctrl-C.")
		return err
	}})
	switch {
	case errors.Is(err, errDone):
		return nil
	case err == nil && o.once:
		return errEarly
	}
	return err
}
