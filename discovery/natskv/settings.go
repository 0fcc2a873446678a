package natskv

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/credentials"
)

// Settings say which broker to use, as whom, and how much of it.
type Settings struct {
	// Mesh is whose registry it is: [a-z0-9-].
	Mesh string
	// URL of the broker, or several with commas between them.
	URL string
	// Server, where set, is a broker in this process; URL is then ignored.
	Server nats.InProcessConnProvider
	// Name is what the broker shows the connection as.
	Name string
	// Auth are the files by which the broker and this process know each other.
	Auth credentials.Broker
	// Replicas of both streams, on as many servers; 0 means 1.
	Replicas int
	// MaxTableBytes bounds the table, with 100 bytes and the key for each entry; the
	// broker reserves it. 0 means 64 MiB. MaxInstancesBytes is the same for the
	// instances, in memory; 0 means 8 MiB.
	MaxTableBytes     int64
	MaxInstancesBytes int64
	Logger            *slog.Logger
}

const (
	maxReplicas          = 5
	defaultMaxTable      = 64 << 20
	defaultMaxInstances  = 8 << 20
	smallestMaxTable     = 1 << 20
	smallestMaxInstances = 64 << 10
)

// Reserves is what the broker sets aside for a registry with these settings, in
// bytes of memory and on file, once for each replica.
func (s Settings) Reserves() (memory, store int64) {
	s = s.withDefaults()
	return s.MaxInstancesBytes, s.MaxTableBytes
}

func (s Settings) withDefaults() Settings {
	s.Replicas = max(1, s.Replicas)
	if s.MaxTableBytes == 0 {
		s.MaxTableBytes = defaultMaxTable
	}
	if s.MaxInstancesBytes == 0 {
		s.MaxInstancesBytes = defaultMaxInstances
	}
	return s
}

func (s Settings) validate() error {
	if err := discovery.ValidService(s.Mesh); err != nil {
		return fmt.Errorf("mesh: %w", err)
	}
	if s.Logger == nil {
		return fmt.Errorf("%w: there is no logger", discovery.ErrInvalid)
	}
	if s.Replicas > maxReplicas {
		return fmt.Errorf("%w: %d replicas, at most %d are possible", discovery.ErrInvalid, s.Replicas, maxReplicas)
	}
	if s.MaxTableBytes < smallestMaxTable || s.MaxInstancesBytes < smallestMaxInstances {
		return fmt.Errorf("%w: a table of %d bytes and instances of %d, at least %d and %d are needed",
			discovery.ErrInvalid, s.MaxTableBytes, s.MaxInstancesBytes, smallestMaxTable, smallestMaxInstances)
	}
	if s.Server != nil {
		return nil
	}
	for text := range strings.SplitSeq(s.URL, ",") {
		if err := validURL(strings.TrimSpace(text)); err != nil {
			return fmt.Errorf("%w: the broker's URL: %w", discovery.ErrInvalid, err)
		}
	}
	return nil
}

// validURL says what is wrong with a URL, without a word of it: it may have a
// password.
func validURL(text string) error {
	if !strings.Contains(text, "://") {
		text = "nats://" + text
	}
	u, err := url.Parse(text)
	var wrong *url.Error
	switch {
	case errors.As(err, &wrong):
		return errors.New("it cannot be read")
	case err != nil:
		return err
	case u.Hostname() == "":
		return errors.New("it has no host")
	}
	return nil
}
