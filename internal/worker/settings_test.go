package worker_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
)

func TestInvalidSettingsNameTheirKey(t *testing.T) {
	t.Parallel()
	plainFile := testbed.WriteFile(t, "notes.txt", "")
	two := func(a, b worker.Replica) []worker.Replica { return []worker.Replica{a, b} }
	for name, test := range map[string]struct {
		edit func(s *worker.Settings)
		want []string
	}{
		"no command":         {func(s *worker.Settings) { s.Command = nil }, []string{"command: it is empty"}},
		"an empty command":   {func(s *worker.Settings) { s.Command = []string{""} }, []string{"command: it is empty"}},
		"an unknown program": {func(s *worker.Settings) { s.Command = []string{"pyhton3", "w.py"} }, []string{`command: there is no program "pyhton3" in PATH, which is "`, os.Getenv("PATH")}},
		"a PATH of its own": {func(s *worker.Settings) {
			s.Command, s.Env = []string{"sh"}, map[string]string{"PATH": "/nowhere"}
		}, []string{`"sh" in PATH, which is "/nowhere"`}},
		"a program that is not there": {func(s *worker.Settings) { s.Command = []string{"./w"} }, []string{"command: there is no program /"}},
		"a program that is a text":    {func(s *worker.Settings) { s.Command = []string{plainFile} }, []string{"is not executable"}},
		"a program that is a folder":  {func(s *worker.Settings) { s.Command = []string{filepath.Dir(plainFile)} }, []string{"is not executable"}},
		"no such folder":              {func(s *worker.Settings) { s.Dir = "/nowhere" }, []string{"dir: /nowhere is not a folder"}},
		"options that are a list":     {func(s *worker.Settings) { s.Options = []byte(`[1]`) }, []string{"options: must be a JSON object"}},
		"options that are nothing":    {func(s *worker.Settings) { s.Options = []byte(`null`) }, []string{"options: must be a JSON object"}},
		"a name with =":               {func(s *worker.Settings) { s.Env = map[string]string{"A=B": ""} }, []string{`env: "A=B" is not a name`}},
		"a variable of the host":      {func(s *worker.Settings) { s.Env = map[string]string{"STAGEMESH_SOCKET": ""} }, []string{"env.STAGEMESH_SOCKET"}},
		"a NUL byte":                  {func(s *worker.Settings) { s.Env = map[string]string{"A": "\x00"} }, []string{"env.A: it has a NUL byte"}},
		"numbers": {func(s *worker.Settings) {
			s.Slots, s.MaxSize, s.MaxFrame, s.StartTries, s.CrashLoop = -1, -1, -1, -1, -1
		}, []string{"slots: -1", "max_size: -1", "max_frame: -1", "start_tries: -1", "crash_loop: -1"}},
		"durations": {func(s *worker.Settings) {
			s.StartLimit, s.RunLimit, s.Heartbeat, s.StopLimit = -1, -1, -1, -1
		}, []string{"start_limit: it is negative", "run_limit: ", "heartbeat: ", "stop_limit: "}},
		"a short maximum": {func(s *worker.Settings) { s.Backoff, s.MaxBackoff = time.Minute, time.Second }, []string{"max_backoff: 1s is less than backoff, 1m0s"}},
		"a CPU that is not there": {func(s *worker.Settings) {
			s.Replicas = two(worker.Replica{}, worker.Replica{CPUs: "0,1023"})
		}, []string{"replicas[1].cpus: there is no CPU 1023; this machine has 0"}},
		"no CPU":     {func(s *worker.Settings) { s.Replicas = []worker.Replica{{CPUs: "all"}} }, []string{`replicas[0].cpus: "all"`}},
		"many ranks": {func(s *worker.Settings) { s.Replicas = []worker.Replica{{Ranks: -2}} }, []string{"replicas[0].ranks: -2"}},
		"one device for two": {func(s *worker.Settings) {
			s.Replicas = two(worker.Replica{Devices: []string{"0", "1"}}, worker.Replica{Devices: []string{"1"}, Shared: true})
		}, []string{"replicas[1].devices: replicas[0] has device 1 too; set shared: true"}},
		"devices in one string":       {func(s *worker.Settings) { s.Replicas = []worker.Replica{{Devices: []string{"0,1"}}} }, []string{`replicas[0].devices: "0,1" is not a device`}},
		"a variable of a replica":     {func(s *worker.Settings) { s.Replicas = []worker.Replica{{Env: map[string]string{"": ""}}} }, []string{"replicas[0].env: "}},
		"several mistakes, all named": {func(s *worker.Settings) { s.Command, s.Slots = nil, -1 }, []string{"command: ", "slots: "}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := worker.Settings{Command: []string{os.Args[0]}}
			test.edit(&s)
			r, err := worker.New(s)
			if err == nil {
				err = r.Start(t.Context())
			}
			if err == nil {
				t.Fatal("it is taken")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error is %v, want %q", err, want)
				}
			}
		})
	}
}

func TestValidSettingsAreAccepted(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(s *worker.Settings){
		"the least": func(*worker.Settings) {},
		"shared devices": func(s *worker.Settings) {
			s.Replicas = []worker.Replica{{Devices: []string{"0"}, Shared: true}, {Devices: []string{"0"}, Shared: true}}
		},
		"a program in PATH":    func(s *worker.Settings) { s.Command = []string{"sh"} },
		"a program in its dir": func(s *worker.Settings) { s.Dir, s.Command = "/bin", []string{"./sh"} },
		"a CPU":                func(s *worker.Settings) { s.Replicas = []worker.Replica{{CPUs: "0"}} },
	} {
		s := worker.Settings{Command: []string{os.Args[0]}}
		edit(&s)
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestConcurrencyIsKnownBeforeStart(t *testing.T) {
	t.Parallel()
	r, err := worker.New(worker.Settings{Command: []string{os.Args[0]}, Slots: 3, Replicas: make([]worker.Replica, 2)})
	if err != nil || r.Concurrency() != 6 {
		t.Errorf("it is %d, %v", r.Concurrency(), err)
	}
}
