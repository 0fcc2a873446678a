package stagemesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"reflect"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Kind is a kind of runner that a stage of a mesh's file may have.
type Kind = meshfile.Kind

// KindOf returns the kind of runner with that key below "runner". Its settings are an S,
// whose fields have yaml tags, and the function builds its runners.
func KindOf[S any, R runner.Runner](key string, build func(S) (R, error)) Kind {
	return meshfile.KindOf(key, build)
}

// Serve runs a program that serves stages of a mesh's file with these kinds of runners:
// it reads the process's arguments, and SIGINT and SIGTERM drain it.
func Serve(kinds ...Kind) error {
	process.ReduceCollections()
	cmd := StageCommand(kinds...)
	cmd.Use = strings.Replace(cmd.Use, "stage", "PROGRAM", 1)
	return cmd.ExecuteContext(context.Background())
}

// StageCommand returns the command stage NAME..., which serves stages of a mesh's file
// with these kinds of runners.
func StageCommand(kinds ...Kind) *cobra.Command {
	var f stageFlags
	cmd := &cobra.Command{
		Use:   "stage NAME...",
		Short: "Serve stages of a mesh file",
		Long: "Serve stages of a mesh file, which join the mesh at its broker. The process is one host of each stage: start as many\n" +
			"processes as you need. The NAMEs may be in STAGEMESH_STAGE instead, separated by commas.\n" +
			"The first SIGINT or SIGTERM drains the hosts, a second one shuts them down without finishing items in flight, a third\n" +
			"ends the process at once.\n\n" + program.EnvironmentHelp,
		Example:       "  stagemesh stage classify --config mesh.yaml --nats nats://127.0.0.1:4222 --ops 127.0.0.1:9091",
		Version:       process.Version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: program.WithEnvironment(func(cmd *cobra.Command, names []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return f.run(ctx, cmd, names, kinds)
		}),
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	f.Add(cmd)
	cmd.Flags().StringVar(&f.host, "host", "", "the host's id, for one NAME; a new one if empty")
	cmd.Flags().StringVar(&f.listen, "listen", "", "the address of the gRPC StageService, for one NAME, instead of the stage's listen")
	return cmd
}

// JoinFlags are the flags of a command that joins a mesh at its broker.
type JoinFlags struct {
	config, nats, consul, ops, advertise string
	exposure                             meshfile.Flags
	process                              *program.Flags
}

// Add adds the flags to a command, which fills them in.
func (f *JoinFlags) Add(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.config, "config", "c", "mesh.yaml", "the mesh file")
	cmd.Flags().StringVar(&f.nats, "nats", "", "the broker's URL, instead of nats.url")
	cmd.Flags().StringVar(&f.consul, "consul", "", "the address of a Consul agent, instead of registry")
	cmd.Flags().StringVar(&f.ops, "ops", "127.0.0.1:0", "the address of /livez, /readyz, /metrics and /debug/pprof; port 0 picks a free one")
	cmd.Flags().StringVar(&f.advertise, "advertise", "", "the host name or IP address to register for ports on all addresses (default: this machine's first address that is not loopback)")
	AddExposure(cmd, &f.exposure)
	f.process = program.AddFlags(cmd)
}

// AddPorts adds the flags of the gateway's addresses.
func (f *JoinFlags) AddPorts(cmd *cobra.Command) { AddPorts(cmd, &f.exposure) }

// AddPorts adds the flags of Listen and Admin to a command.
func AddPorts(cmd *cobra.Command, f *meshfile.Flags) {
	cmd.Flags().StringVar(&f.Listen, "listen", "", "the address for callers, instead of gateway.listen; port 0 picks a free one")
	cmd.Flags().StringVar(&f.Admin, "admin", "", "the address for operators, instead of gateway.admin.listen")
}

// AddExposure adds the flags of Insecure and AnyHost to a command.
func AddExposure(cmd *cobra.Command, f *meshfile.Flags) {
	cmd.Flags().BoolVar(&f.Insecure, "insecure", false, "allow other machines to call all addresses, of flags and of the file, without authentication")
	cmd.Flags().BoolVar(&f.AnyHost, "any-host", false, "allow callers of loopback addresses, such as a proxy, to name any host")
}

// Read reads the mesh's file with the broker of the flags, and returns what runs a part
// of it. Messages name the flags.
func (f JoinFlags) Read(cmd *cobra.Command, kinds ...Kind) (p Program, err error) {
	if p.Logger, err = f.process.Apply(cmd.ErrOrStderr()); err != nil {
		return p, err
	}
	if f.nats != "" && f.nats != os.Getenv(program.Variable("nats")) && meshfile.HasSecret(f.nats) {
		return p, errors.New("--nats: other users of this machine can read a password or token in a flag; put it into nats.token_file, nats.credentials_file or nats.url of the file, or into STAGEMESH_NATS")
	}
	if f.nats != "" {
		if err := meshfile.ValidBroker(f.nats); err != nil {
			return p, fmt.Errorf("--nats: %w", err)
		}
	}
	if strings.ContainsAny(f.advertise, " /[]") || strings.Contains(f.advertise, ":") && net.ParseIP(f.advertise) == nil {
		return p, fmt.Errorf("--advertise: %q is not a host name or IP address; leave out the port", f.advertise)
	}
	if err := errors.Join(config.Address("--listen", f.exposure.Listen), config.Address("--admin", f.exposure.Admin)); err != nil {
		return p, err
	}
	flags := f.exposure
	flags.Broker, flags.Consul = f.nats, f.consul
	if p.File, err = flags.Read(f.config, kinds...); err != nil {
		return p, meshfile.FlagError("--config", err)
	}
	if p.File.NATS.URL == "" {
		return p, errors.New("--nats: is missing, and so is nats.url in the file; this process joins the others at a broker, such as nats://127.0.0.1:4222")
	}
	p.Ops, p.OpsKey, p.Advertise = f.ops, "--ops", f.advertise
	return p, config.Address("--ops", f.ops)
}

type stageFlags struct {
	JoinFlags
	host, listen string
}

func (f stageFlags) run(ctx context.Context, cmd *cobra.Command, names []string, kinds []Kind) error {
	if variable := os.Getenv(program.Variable("stage")); len(names) == 0 && variable != "" {
		names = strings.Split(variable, ",")
	}
	p, err := f.Read(cmd, kinds...)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("give the NAME of a stage; %s has %s", f.config, cmp.Or(strings.Join(p.File.StageNames(), ", "), "none"))
	}
	if err := f.override(p.File, names); err != nil {
		return err
	}
	p.Stages, p.Host, p.NoGateway = names, pipeline.HostID(f.host), true
	p.Ready = func(m *Mesh, operations net.Addr) error {
		for _, s := range m.Stages() {
			if _, err := fmt.Fprintf(cmd.OutOrStdout(), "stage %s of mesh %s is ready on host %s (operations: http://%s)\n", s.Stage, s.Mesh, s.Host, operations); err != nil {
				return err
			}
		}
		return nil
	}
	return p.Run(ctx)
}

// override puts the flags of one stage into the file.
func (f stageFlags) override(file *File, names []string) error {
	if err := config.Address("--listen", f.listen); err != nil {
		return err
	}
	if f.host != "" {
		if err := pipeline.ValidName("host", f.host); err != nil {
			return fmt.Errorf("--host: %w", err)
		}
	}
	if len(names) > 1 && (f.host != "" || f.listen != "") {
		return errors.New("--host and --listen are for one NAME")
	}
	for _, name := range names {
		if s, ok := file.Stages[name]; ok {
			s.Hosts, s.Listen = 1, cmp.Or(f.listen, s.Listen)
			file.Stages[name] = s
		}
	}
	return nil
}

// Program is a mesh, or a part of one, that runs as a process: with an operations port.
type Program struct {
	File *File
	// FileSettings has the parts that run. Its Meter and Version are filled in.
	FileSettings
	// Ops is the address of the operations port, and OpsKey its name in messages; empty
	// means the file's.
	Ops, OpsKey string
	// Ready is called once everything is ready, with the address of the operations port;
	// its error ends the mesh.
	Ready func(m *Mesh, operations net.Addr) error
}

// Run runs the mesh until the context ends, and drains it.
func (p Program) Run(ctx context.Context) error {
	var wrong []error
	p.File.Tracing, wrong = p.File.Tracing.WithEnvironment(os.Getenv)
	for _, err := range wrong {
		p.Logger.Warn("a variable of the environment is left out", "error", err)
	}
	credentials.WarnOfReaders(p.Logger, p.File.SecretFiles())
	ops := program.Settings{Listen: p.Ops, Key: p.OpsKey, Insecure: p.File.Ops.Insecure, AnyHost: p.File.Ops.AnyHost, Version: process.Version(), Tracing: p.File.Tracing, Logger: p.Logger}
	if ops.Listen == "" {
		ops.Listen, ops.Key = p.File.OpsListen(), "ops.listen"
	}
	p.Version = process.Version()
	m, err := FromFile(p.File, p.FileSettings)
	if errors.Is(err, ErrAlone) {
		return fmt.Errorf("--stages: %w", err)
	}
	if err != nil {
		return err
	}
	return program.Run(ctx, ops, func(ctx context.Context, port *program.Port) error {
		m.metrics = port.Metrics
		m.meter.Meter, m.settings.Operations = port.Meter(), config.Advertised(port.Addr().String(), p.Advertise)
		m.settings.TracerProvider = port.TracerProvider()
		port.Watch(func() (string, error) { return m.remarks(), m.Ready() })
		port.WatchStore(m.StoreReady)
		if url := p.File.NATS.URL; url != "" {
			p.Logger.Info("waiting for the broker", "url", meshfile.Redacted(url))
		}
		if err := m.Start(ctx); err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // it was asked to stop before it was ready
			}
			return err
		}
		err := p.Ready(m, port.Addr())
		if err == nil {
			var reloads sync.WaitGroup
			serving, stop := context.WithCancel(ctx)
			if p.File.Path() != "" && !p.NoGateway && !p.NoBroker {
				reloads.Go(func() { p.reloadOnSave(serving, m) })
			}
			err = m.Wait(ctx)
			stop()
			reloads.Wait()
		}
		return m.stopWith(err)
	})
}

// reloadOnSave takes the jobs of the file each time that it is saved, until the context ends. A
// file with errors changes nothing.
func (p Program) reloadOnSave(ctx context.Context, m *Mesh) {
	saved := make(chan struct{}, 1)
	var watching sync.WaitGroup
	defer watching.Wait()
	// The file may have been saved since it was read.
	watching.Go(func() { program.Watch(ctx, p.File.Path(), program.FileVersion{}, saved) })
	for taken := p.File.Jobs; ; {
		select {
		case <-saved:
		case <-ctx.Done():
			return
		}
		file, err := p.File.Reload()
		if err == nil && reflect.DeepEqual(file.Jobs, taken) {
			continue
		}
		if err == nil {
			err = file.At(m.SetJobs(file.Jobs))
		}
		if err != nil {
			p.Logger.Error("the mesh file that was saved is not used", "error", err)
			continue
		}
		rest, before := file.Jobs, p.File.Jobs
		rest.Pools, rest.Queues, before.Pools, before.Queues = nil, nil, nil, nil
		if !reflect.DeepEqual(rest, before) {
			p.Logger.Warn("changes of jobs other than its pools and queues need a restart", "file", p.File.Path())
		}
		taken = file.Jobs
		p.Logger.Info("the jobs of the mesh file were replaced", "file", p.File.Path())
	}
}
