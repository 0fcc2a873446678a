package meshfile

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Validate checks everything that can be told without starting anything: of the
// files that it names only those that its kinds of runners read to be made.
func (f *File) Validate() error {
	errs := []error{
		f.validateShared(),
		f.At(f.Gateway.validate(), "gateway"),
		f.At(listen(f.Ops.Listen), "ops"),
	}
	if len(f.Stages) == 0 {
		errs = append(errs, f.At(errors.New("there are none"), "stages"))
	}
	for _, name := range f.StageNames() {
		_, err := f.Host(name)
		errs = append(errs, err)
	}
	_, err := f.Routes()
	return errors.Join(append(errs, err)...)
}

// validateShared checks what every process of the mesh has to agree on.
func (f *File) validateShared() error {
	return errors.Join(
		f.At(pipeline.ValidName("mesh", f.Mesh), "mesh"),
		f.At(f.NATS.validate(), "nats"),
	)
}

// Bounds on what the broker in the process takes in one message.
const (
	minBrokerPayload = 64 << 10
	maxBrokerPayload = 64 << 20
)

func (n NATS) validate() error {
	errs := []error{listen(n.Listen)}
	if n.MaxPayload != 0 && (n.MaxPayload < minBrokerPayload || n.MaxPayload > maxBrokerPayload) {
		errs = append(errs, fmt.Errorf("max_payload: %s is not between %s and %s", n.MaxPayload, config.Bytes(minBrokerPayload), config.Bytes(maxBrokerPayload)))
	}
	if n.URL == "" && n.CredentialsFile != "" {
		errs = append(errs, errors.New("credentials_file: is for a broker of its own; without url there is none"))
	}
	if n.URL == "" {
		return errors.Join(errs...)
	}
	if err := ValidBroker(n.URL); err != nil {
		errs = append(errs, fmt.Errorf("url: %w", err))
	}
	return errors.Join(append(errs, inProcess("listen", n.Listen), inProcess("store_dir", n.StoreDir), inProcess("max_payload", n.MaxPayload))...)
}

// inProcess refuses a value that only the broker in the process has.
func inProcess[T comparable](key string, value T) error {
	var zero T
	if value != zero {
		return fmt.Errorf("%s: is for the broker in the process; with url there is none", key)
	}
	return nil
}

// ValidBroker checks the URL of a broker, or several with commas between them.
func ValidBroker(urls string) error {
	for server := range strings.SplitSeq(urls, ",") {
		server = strings.TrimSpace(server)
		if !strings.Contains(server, "://") {
			server = "nats://" + server
		}
		// What is wrong with it may show a password.
		if u, err := url.Parse(server); err != nil || u.Hostname() == "" {
			return errors.New("this is no URL of a broker, such as nats://127.0.0.1:4222")
		}
	}
	return nil
}

// Redacted returns the URLs of a broker without passwords.
func Redacted(urls string) string {
	out := strings.Split(urls, ",")
	for i, one := range out {
		out[i] = "***"
		if u, err := url.Parse(strings.TrimSpace(one)); err == nil {
			out[i] = u.Redacted()
		}
	}
	return strings.Join(out, ",")
}

func (g Gateway) validate() error {
	errs := []error{
		listen(g.Listen),
		notNegative("max_in_flight", g.MaxInFlight),
		notNegative("timeout", g.Timeout),
		notNegative("max_timeout", g.MaxTimeout),
		notNegative("drain_timeout", g.DrainTimeout),
	}
	if g.MaxTimeout > 0 && g.Timeout > g.MaxTimeout {
		errs = append(errs, fmt.Errorf("timeout: %s is more than the max_timeout of %s", g.Timeout, g.MaxTimeout))
	}
	return errors.Join(errs...)
}

// maxHosts bounds the hosts of one stage in one process.
const maxHosts = 64

// validate checks what a host's own validation does not.
func (s Stage) validate() error {
	errs := []error{
		listen(s.Listen),
		notNegative("max_in_flight", s.MaxInFlight),
		notNegative("drain_timeout", s.DrainTimeout),
		notNegative("queue.max_items", s.Queue.MaxItems),
		notNegative("queue.ack_wait", s.Queue.AckWait),
		notNegative("queue.replicas", s.Queue.Replicas),
		notNegative("queue.version", s.Queue.Version),
	}
	if s.Hosts < 0 || s.Hosts > maxHosts {
		errs = append(errs, fmt.Errorf("hosts: %d is not between 1 and %d", s.Hosts, maxHosts))
	}
	return errors.Join(errs...)
}

func notNegative[N cmp.Ordered](key string, n N) error {
	var zero N
	if n < zero {
		return fmt.Errorf("%s: %v is negative", key, n)
	}
	return nil
}

// listen checks the key of that name; empty means that nobody listens.
func listen(addr string) error {
	if addr == "" {
		return nil
	}
	if err := ValidAddress(addr); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	return nil
}

// ValidAddress checks an address to listen on.
func ValidAddress(addr string) error {
	if _, port, err := net.SplitHostPort(addr); err != nil || port == "" {
		return fmt.Errorf("%q is no address such as 127.0.0.1:8080, or :8080 for all of this machine's", addr)
	}
	return nil
}
