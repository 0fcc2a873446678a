package suite

import (
	"bufio"
	"context"
	"debug/buildinfo"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// Machine is what the suite ran on.
type Machine struct {
	Cores int `json:"cores"`
	// CPU is its model, where the system says.
	CPU  string `json:"cpu,omitempty"`
	OS   string `json:"os"`
	Arch string `json:"arch"`
}

// Versions are of what took part.
type Versions struct {
	Stagemesh string `json:"stagemesh"`
	// Go that the program was built with.
	Go         string `json:"go"`
	NATSServer string `json:"nats_server"`
	NATSClient string `json:"nats_client"`
	Python     string `json:"python,omitempty"`
}

// cpuInfo is where Linux says what the processors are.
const cpuInfo = "/proc/cpuinfo"

func thisMachine() Machine {
	return Machine{Cores: runtime.GOMAXPROCS(0), CPU: cpuModel(cpuInfo), OS: runtime.GOOS, Arch: runtime.GOARCH}
}

// cpuModel returns the first model that the file names.
func cpuModel(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return "" // other systems have none
	}
	defer f.Close() //nolint:errcheck // it was only read
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, model, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(model)
		}
	}
	return ""
}

// versionsOf returns what is in the program, as far as it is a program in Go.
func versionsOf(ctx context.Context, program string) Versions {
	out := Versions{Python: python(ctx)}
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return out
	}
	out.Go = info.GoVersion
	for _, dependency := range info.Deps {
		switch dependency.Path {
		case "github.com/nats-io/nats-server/v2":
			out.NATSServer = dependency.Version
		case "github.com/nats-io/nats.go":
			out.NATSClient = dependency.Version
		}
	}
	return out
}

// python returns the version of the Python that runs workers, if there is one.
func python(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	text, err := exec.CommandContext(ctx, "python3", "--version").Output()
	if err != nil {
		return ""
	}
	return strings.TrimPrefix(strings.TrimSpace(string(text)), "Python ")
}
