package main

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/stagemesh/stagemesh/mesh/process"
)

// stack is the services of a compose file on this machine.
type stack struct {
	project *types.Project
	// programs are the paths of the services' programs, by the last part of the image's name.
	programs map[string]string
	// folder holds the volumes, and copies of what the services mount.
	folder string
	out    *output
	// ports are the ports on this machine of those that the services listen on.
	ports map[listener]int
	// children are all processes, running or not.
	children []*child
}

// listener is a port in a container.
type listener struct {
	service string
	replica int
	port    int
}

func newStack(project *types.Project, programs map[string]string, folder string, out io.Writer) *stack {
	delete(project.Services, "grafana")
	return &stack{project: project, programs: programs, folder: folder, out: &output{to: out}, ports: map[listener]int{}}
}

// group returns the processes of all services, each after those that it depends on.
func (s *stack) group(ctx context.Context) (*process.Group, error) {
	if err := s.checkPublished(ctx); err != nil {
		return nil, err
	}
	var parts []process.Part
	err := s.project.ForEachService(nil, func(name string, service *types.ServiceConfig) error {
		for replica := range service.GetScale() {
			part, err := s.part(name, replica+1)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			parts = append(parts, part)
		}
		return nil
	})
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
			s.ports[listener{name, 1, int(p.Target)}] = l.Addr().(*net.TCPAddr).Port
			if err := l.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// published returns the addresses that services publish.
func (s *stack) published() string {
	var out []string
	for _, name := range s.project.ServiceNames() {
		for _, p := range s.project.Services[name].Ports {
			out = append(out, fmt.Sprintf("%s http://127.0.0.1:%d", name, s.ports[listener{name, 1, int(p.Target)}]))
		}
	}
	return strings.Join(out, ", ")
}

// part returns the process of a replica of a service: with its command, its environment and
// its mounts, where all paths and addresses are those of this machine.
func (s *stack) part(name string, replica int) (part process.Part, err error) {
	service := s.project.Services[name]
	image, _, _ := strings.Cut(path.Base(service.Image), ":")
	program, ok := s.programs[image]
	switch {
	case !ok:
		return part, fmt.Errorf("there is no program for the image %s", service.Image)
	case service.HealthCheck == nil || len(service.HealthCheck.Test) < 2:
		return part, errors.New("there is no health check")
	}
	at := place{stack: s, service: name, replica: replica}
	c := &child{name: name + "-" + strconv.Itoa(replica), grace: 10 * time.Second} // Docker's default
	if service.StopGracePeriod != nil {
		c.grace = time.Duration(*service.StopGracePeriod)
	}
	for _, v := range service.Volumes {
		at.mounts = append(at.mounts, v.Target, filepath.Join(s.folder, c.name, v.Target))
	}
	for i, v := range service.Volumes {
		if v.Type == types.VolumeTypeBind {
			err = at.copy(v.Source, at.mounts[2*i+1])
		} else {
			err = os.MkdirAll(at.mounts[2*i+1], 0o700)
		}
		if err != nil {
			return part, err
		}
	}
	c.cmd = exec.Command(program) //nolint:noctx // run ends it
	for _, arg := range service.Command {
		c.cmd.Args = append(c.cmd.Args, at.rewrite(arg))
	}
	c.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + s.folder}
	for key, value := range service.Environment {
		if value != nil {
			c.cmd.Env = append(c.cmd.Env, key+"="+at.rewrite(*value))
		}
	}
	for _, arg := range service.HealthCheck.Test[1:] {
		c.check = append(c.check, at.rewrite(arg))
	}
	lines := &lineWriter{out: s.out, name: c.name}
	c.cmd.Stdout, c.cmd.Stderr = lines, lines
	s.children = append(s.children, c)
	return process.Part{Name: c.name, Run: c.run, Ready: c.awaitHealthy}, nil
}

// place is where the paths and addresses of a replica are on this machine.
type place struct {
	stack   *stack
	service string
	replica int
	// mounts are the paths in the container, each before its path here.
	mounts []string
}

var (
	// address is a service or a replica itself, with a port.
	address = regexp.MustCompile(`\b([a-z][a-z0-9-]*|0\.0\.0\.0|127\.0\.0\.1):(\d{2,5})\b`)
	// portFlag is a flag with a port, such as Consul has.
	portFlag = regexp.MustCompile(`^(-[a-z-]*port=)(\d{2,5})$`)
)

// rewrite replaces paths and addresses of containers in a text.
func (a place) rewrite(text string) string {
	for i := 0; i < len(a.mounts); i += 2 {
		path := regexp.MustCompile(`(^|[^\w/.-])` + regexp.QuoteMeta(a.mounts[i]) + `\b`)
		text = path.ReplaceAllString(text, "${1}"+a.mounts[i+1])
	}
	text = portFlag.ReplaceAllStringFunc(text, func(found string) string {
		parts := portFlag.FindStringSubmatch(found)
		return parts[1] + a.port(a.service, a.replica, parts[2])
	})
	text = address.ReplaceAllStringFunc(text, func(found string) string {
		host, port, _ := strings.Cut(found, ":")
		switch _, isService := a.stack.project.Services[host]; {
		case isService:
			port = a.port(host, 1, port)
		case strings.Contains(host, "."):
			port = a.port(a.service, a.replica, port)
		default:
			return found
		}
		return net.JoinHostPort("127.0.0.1", port)
	})
	return strings.ReplaceAll(text, "0.0.0.0", "127.0.0.1")
}

// port returns the port on this machine of a port in a container.
func (a place) port(service string, replica int, text string) string {
	number, err := strconv.Atoi(text)
	if err != nil {
		return text
	}
	key := listener{service, replica, number}
	if a.stack.ports[key] == 0 {
		a.stack.ports[key] = a.stack.freePort()
	}
	return strconv.Itoa(a.stack.ports[key])
}

// Free ports are below those of outgoing connections, which may take any of theirs.
const firstPort, lastPort, portTries = 20_000, 30_000, 1_000

// freePort returns a port that is free now, and that no other listener of the stack has.
func (s *stack) freePort() int {
	taken := slices.Collect(maps.Values(s.ports))
	for range portTries {
		port := firstPort + rand.IntN(lastPort-firstPort)                              //nolint:gosec // it keeps no secret
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))) //nolint:noctx // it does not wait
		if err != nil {
			continue
		}
		_ = l.Close() // it accepted nothing
		if !slices.Contains(taken, port) {
			return port
		}
	}
	return 0 // the process that gets it says that it has none
}

// copy copies a file or a folder, with the addresses in configuration rewritten.
func (a place) copy(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if slices.Contains([]string{".conf", ".yaml", ".yml"}, filepath.Ext(path)) {
			text = []byte(a.rewrite(string(text)))
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
			return err
		}
		return os.WriteFile(target, text, 0o600)
	})
}
