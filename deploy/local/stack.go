package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/stagemesh/stagemesh/internal/process"
)

// stack is the services of a compose file on this machine.
type stack struct {
	project *types.Project
	// programs are the paths of the services' programs, by the last part of the image's name.
	programs map[string]string
	// folder holds the volumes, and copies of what the services mount.
	folder string
	out    io.Writer
	// scales is true if stagemesh scale sets the replicas of the stages.
	scales bool
	// mu guards ports, which has the ports of replicas on this machine, by the name and the port in the container,
	// and children, which are all that were started.
	mu       sync.Mutex
	ports    map[string]string
	children []*child
}

func newStack(project *types.Project, programs map[string]string, folder string, out io.Writer) *stack {
	delete(project.Services, "grafana")
	return &stack{project: project, programs: programs, folder: folder, out: out, ports: map[string]string{}}
}

// logger returns what prints lines after a name.
func (s *stack) logger(name string) *log.Logger {
	return log.New(s.out, fmt.Sprintf("%-13s| ", name), 0)
}

// group returns the processes of all services, each after those that it depends on.
func (s *stack) group(ctx context.Context) (*process.Group, error) {
	if err := s.checkPublished(ctx); err != nil {
		return nil, err
	}
	var parts []process.Part
	err := s.project.ForEachService(nil, func(name string, service *types.ServiceConfig) error {
		if s.scales && isStage(service) {
			return nil
		}
		for replica := range service.GetScale() {
			part, err := s.part(name, replica+1)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			parts = append(parts, part)
		}
		return nil
	})
	if err == nil && s.scales {
		var part process.Part
		part, err = s.scaler()
		parts = append(parts, part)
	}
	return process.New(slog.New(slog.DiscardHandler), parts...), err
}

// checkPublished reserves the published ports, if they are free.
func (s *stack) checkPublished(ctx context.Context) error {
	for name, service := range s.project.Services {
		for _, p := range service.Ports {
			var lc net.ListenConfig
			address := net.JoinHostPort(p.HostIP, p.Published)
			l, err := lc.Listen(ctx, "tcp", address)
			if err != nil {
				return fmt.Errorf("the port of %s is taken: %w; %s_PORT=<port> says another one", name, err, strings.ToUpper(name))
			}
			_, port, err := net.SplitHostPort(l.Addr().String())
			if err := errors.Join(err, l.Close()); err != nil {
				return err
			}
			s.ports[replicaName(name, 1)+":"+fmt.Sprint(p.Target)] = port
		}
	}
	return nil
}

// published returns the addresses that services publish.
func (s *stack) published() string {
	var out []string
	for _, name := range s.project.ServiceNames() {
		service := s.project.Services[name]
		for _, p := range service.Ports {
			if service.GetScale() > 0 {
				out = append(out, name+" "+s.url(name, p.Target))
			}
		}
	}
	return strings.Join(out, ", ")
}

// url returns the address of a published port.
func (s *stack) url(service string, port uint32) string {
	return "http://127.0.0.1:" + s.port(replicaName(service, 1), fmt.Sprint(port))
}

// part returns a replica of a service that runs as long as the stack.
func (s *stack) part(name string, replica int) (part process.Part, err error) {
	c, err := s.child(name, replica)
	if err != nil {
		return part, err
	}
	return process.Part{Name: c.name, Run: c.run, Ready: c.awaitHealthy}, nil
}

// child returns the process of a replica of a service: with its command, its environment and
// its mounts, with paths and addresses of this machine.
func (s *stack) child(name string, replica int) (c *child, err error) {
	service := s.project.Services[name]
	image, _, _ := strings.Cut(path.Base(service.Image), ":")
	program, ok := s.programs[image]
	switch {
	case !ok:
		return nil, fmt.Errorf("there is no program for the image %s", service.Image)
	case service.HealthCheck == nil || len(service.HealthCheck.Test) < 2:
		return nil, errors.New("there is no health check")
	}
	c = &child{stack: s, name: replicaName(name, replica), grace: 10 * time.Second} // Docker's default
	if service.StopGracePeriod != nil {
		c.grace = time.Duration(*service.StopGracePeriod)
	}
	for _, v := range service.Volumes {
		c.mounts = append(c.mounts, v.Target, filepath.Join(s.folder, c.name, v.Target))
	}
	for i, v := range service.Volumes {
		if v.Type == types.VolumeTypeBind {
			err = c.copy(v.Source, c.mounts[2*i+1])
		} else {
			err = os.MkdirAll(c.mounts[2*i+1], 0o700)
		}
		if err != nil {
			return nil, err
		}
	}
	c.cmd = exec.Command(program) //nolint:noctx // run ends it
	for _, arg := range service.Command {
		c.cmd.Args = append(c.cmd.Args, c.rewrite(arg))
	}
	c.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + s.folder}
	for key, value := range service.Environment {
		if value != nil {
			c.cmd.Env = append(c.cmd.Env, key+"="+c.rewrite(*value))
		}
	}
	for _, arg := range service.HealthCheck.Test[1:] {
		c.check = append(c.check, c.rewrite(arg))
	}
	lines := &lineWriter{out: s.logger(c.name)}
	c.cmd.Stdout, c.cmd.Stderr = lines, lines
	s.mu.Lock()
	defer s.mu.Unlock()
	s.children = append(s.children, c)
	return c, nil
}

// address names a service or a replica itself, with a port, or a flag with a port, such
// as Consul has.
var address = regexp.MustCompile(`(^-[a-z-]*port=|\b([a-z][a-z0-9-]*|0\.0\.0\.0|127\.0\.0\.1):)\d{2,5}\b`)

// rewrite replaces paths and addresses of containers in a text.
func (c *child) rewrite(text string) string {
	for i := 0; i < len(c.mounts); i += 2 {
		path := regexp.MustCompile(`(^|[^\w/.-])` + regexp.QuoteMeta(c.mounts[i]) + `\b`)
		text = path.ReplaceAllString(text, "${1}"+c.mounts[i+1])
	}
	text = address.ReplaceAllStringFunc(text, func(found string) string {
		at := strings.LastIndexAny(found, ":=")
		host, port := found[:at], found[at+1:]
		_, isService := c.stack.project.Services[host]
		switch {
		case isService:
			return "127.0.0.1:" + c.stack.port(replicaName(host, 1), port)
		case strings.Contains(host, "."):
			return "127.0.0.1:" + c.stack.port(c.name, port)
		case found[at] == '=':
			return host + "=" + c.stack.port(c.name, port)
		}
		return found
	})
	return strings.ReplaceAll(text, "0.0.0.0", "127.0.0.1")
}

func replicaName(service string, replica int) string { return service + "-" + strconv.Itoa(replica) }

// port returns the port on this machine of a replica's port.
func (s *stack) port(replica, port string) string {
	key := replica + ":" + port
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ports[key] == "" {
		s.ports[key] = s.freePort()
	}
	return s.ports[key]
}

// Free ports are below the range of outgoing connections, which may take any in it.
const firstPort, lastPort, portTries = 20_000, 30_000, 1_000

// freePort returns a port that is free now, and that no other replica has.
func (s *stack) freePort() string {
	taken := slices.Collect(maps.Values(s.ports))
	for range portTries {
		port := strconv.Itoa(firstPort + rand.IntN(lastPort-firstPort))  //nolint:gosec // it keeps no secret
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", port)) //nolint:noctx // it does not wait
		if err == nil && l.Close() == nil && !slices.Contains(taken, port) {
			return port
		}
	}
	return "0" // the process that gets it says that it has none
}

// copy copies a file or a folder, with the addresses in configuration rewritten.
func (c *child) copy(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if slices.Contains([]string{".conf", ".yaml", ".yml"}, filepath.Ext(path)) {
			text = []byte(c.rewrite(string(text)))
		}
		if c.stack.scales && filepath.Base(path) == "mesh.yaml" {
			if text, err = addScaler(text); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
			return err
		}
		return os.WriteFile(target, text, 0o600)
	})
}
