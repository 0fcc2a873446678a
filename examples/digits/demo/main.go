// Command demo runs the digits mesh in this process, sends it the example
// images through its public API, prints what it reads in them, and keeps
// serving until it is stopped. `make run` is it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/services/runners"
)

func main() {
	once := flag.Bool("once", false, "exit after the table; non-zero if a request failed")
	listen := flag.String("listen", meshfile.DefaultListen, "the gateway's address")
	admin := flag.String("admin", meshfile.DefaultAdmin, "the admin address")
	ops := flag.String("ops", meshfile.DefaultOps, "the operations address")
	level := flag.String("log-level", "warn", "debug, info, warn or error")
	flag.Parse()
	if err := start(flag.Args(), options{once: *once, listen: *listen, admin: *admin, ops: *ops, level: *level}); err != nil {
		fmt.Fprintln(os.Stderr, "digits:", err)
		os.Exit(1)
	}
}

func start(arguments []string, o options) error {
	if len(arguments) > 0 {
		return fmt.Errorf("%q is not a flag; see --help", arguments[0])
	}
	ctx, stop := process.SignalContext(context.Background())
	defer stop()
	return run(ctx, os.Stdout, o)
}

type options struct {
	once                      bool
	listen, admin, ops, level string
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
	file.Gateway.Listen, file.Gateway.Admin.Listen, file.Ops.Listen = o.listen, o.admin, o.ops
	log, err := program.Flags{Level: o.level, Format: "text"}.Apply(os.Stderr)
	if err != nil {
		return err
	}
	p := stagemesh.Program{File: file, FileSettings: stagemesh.FileSettings{Logger: log}, Ready: func(m *stagemesh.Mesh, _ net.Addr) error {
		address := m.URL()
		if err := show(ctx, out, address); err != nil {
			return err
		}
		if o.once {
			return errDone
		}
		return printHint(out, address, m.AdminURL())
	}}
	err = p.Run(ctx)
	switch {
	case errors.Is(err, errDone):
		return nil
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%w; is another mesh running? --listen, --admin and --ops choose other addresses: make run LISTEN=127.0.0.1:0 ADMIN=127.0.0.1:0 OPS=127.0.0.1:0", err)
	case err == nil && o.once:
		return errEarly
	}
	return err
}
