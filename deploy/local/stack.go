package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/compose-spec/compose-go/v2/types"
)

// stack is the processes of a compose file's services. Its methods are for one goroutine.
type stack struct {
	project *types.Project
	// programs are the paths of the services' programs, by the last part of the image's name.
	programs map[string]string
	// folder holds the volumes, and copies of what the services mount.
	folder string
	out    *output
	// ports are the ports on this machine of those that the services listen on.
	ports map[listener]int
	// running are the processes, in the order in which they were started.
	running []*child
	// failed receives the error of the first process that ends by itself.
	failed chan error
}

// listener is a port in a container.
type listener struct {
	service string
	replica int
	port    int
}

func newStack(project *types.Project, programs map[string]string, out io.Writer) (*stack, error) {
	folder, err := os.MkdirTemp("", "stagemesh-stack-")
	if err != nil {
		return nil, err
	}
	return &stack{
		project: project, programs: programs, folder: folder, out: &output{to: out},
		ports: map[listener]int{}, failed: make(chan error, 1),
	}, nil
}

// start starts all services, each after those that it depends on are healthy, and returns
// when all are. The caller stops the stack, also after an error.
func (s *stack) start(ctx context.Context) error {
	if err := s.checkPublished(ctx); err != nil {
		return err
	}
	return s.project.ForEachService(nil, func(name string, service *types.ServiceConfig) error {
		return s.scale(ctx, name, service.GetScale())
	})
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

// scale starts or stops replicas of a service, and returns when those that it has started
// are healthy.
func (s *stack) scale(ctx context.Context, name string, replicas int) error {
	service := s.project.Services[name]
	image, _, _ := strings.Cut(path.Base(service.Image), ":")
	if image == "grafana" {
		s.out.print("stack", "Grafana is left out: it runs with Docker only")
		return nil
	}
	program, ok := s.programs[image]
	if !ok {
		return fmt.Errorf("%s: there is no program for the image %s", name, service.Image)
	}
	if service.HealthCheck == nil || len(service.HealthCheck.Test) < 2 {
		return fmt.Errorf("%s: there is no health check", name)
	}
	var started []*child
	for replica := s.replicas(name) + 1; replica <= replicas; replica++ {
		p, err := s.launch(service, replica, program)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		s.running = append(s.running, p)
		started = append(started, p)
	}
	for _, p := range started {
		if err := p.awaitHealthy(ctx); err != nil {
			return err
		}
	}
	for replica := s.replicas(name); replica > replicas; replica-- {
		i := slices.IndexFunc(s.running, func(p *child) bool { return p.name == processName(name, replica) })
		p := s.running[i]
		s.running = slices.Delete(s.running, i, i+1)
		if err := p.stop(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *stack) replicas(name string) int {
	n := 0
	for _, p := range s.running {
		if p.service == name {
			n++
		}
	}
	return n
}

// stop stops all processes in reverse order, those of one service together. When the context
// ends, it kills what is left.
func (s *stack) stop(ctx context.Context) error {
	var errs []error
	for len(s.running) > 0 {
		last := s.running[len(s.running)-1].service
		var stopping sync.WaitGroup
		var mu sync.Mutex
		s.running = slices.DeleteFunc(s.running, func(p *child) bool {
			if p.service != last {
				return false
			}
			stopping.Go(func() {
				err := p.stop(ctx)
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			})
			return true
		})
		stopping.Wait()
	}
	return errors.Join(append(errs, os.RemoveAll(s.folder))...)
}

// launch starts a replica of a service: with its command, its environment and its mounts,
// where all paths and addresses are those of this machine.
func (s *stack) launch(service types.ServiceConfig, replica int, path string) (*child, error) {
	at := place{stack: s, service: service.Name, replica: replica}
	for _, v := range service.Volumes {
		at.mounts = append(at.mounts, v.Target, filepath.Join(s.folder, processName(service.Name, replica), v.Target))
	}
	for i, v := range service.Volumes {
		source := at.mounts[2*i+1]
		err := os.MkdirAll(filepath.Dir(source), 0o700)
		if v.Type == types.VolumeTypeBind {
			err = errors.Join(err, at.copy(v.Source, source))
		} else {
			err = errors.Join(err, os.MkdirAll(source, 0o700))
		}
		if err != nil {
			return nil, err
		}
	}
	var args, env []string
	for _, arg := range service.Command {
		args = append(args, at.rewrite(arg))
	}
	for key, value := range service.Environment {
		if value != nil {
			env = append(env, key+"="+at.rewrite(*value))
		}
	}
	p := &child{
		name: processName(service.Name, replica), service: service.Name, out: s.out, failed: s.failed,
		grace: 10 * time.Second, // Docker's default
	}
	if service.StopGracePeriod != nil {
		p.grace = time.Duration(*service.StopGracePeriod)
	}
	for _, arg := range service.HealthCheck.Test[1:] {
		p.check = append(p.check, at.rewrite(arg))
	}
	return p, p.start(path, args, append(env, "PATH="+os.Getenv("PATH"), "HOME="+s.folder))
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
		if err != nil {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if entry.IsDir() {
			return os.MkdirAll(target, 0o700)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if slices.Contains([]string{".conf", ".yaml", ".yml"}, filepath.Ext(path)) {
			text = []byte(a.rewrite(string(text)))
		}
		return os.WriteFile(target, text, 0o600)
	})
}

func processName(service string, replica int) string { return service + "-" + strconv.Itoa(replica) }
