package fork

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// modeVariable makes the test binary a process under test.
const modeVariable = "SPAWN_TEST_MODE"

func TestMain(m *testing.M) {
	if mode := os.Getenv(modeVariable); mode != "" {
		os.Exit(be(mode, os.Args[1:])) //nolint:forbidigo // this is main
	}
	goleak.VerifyTestMain(m)
}

// be is what processes under test do.
func be(mode string, args []string) int {
	switch mode {
	case "exit":
		code, _ := strconv.Atoi(args[0])
		return code
	case "signal":
		n, _ := strconv.Atoi(args[0])
		_ = syscall.Kill(os.Getpid(), syscall.Signal(n))
		select {}
	case "print":
		fmt.Fprint(os.Stdout, args[0])
		fmt.Fprint(os.Stderr, args[1])
	case "flood":
		out := bufio.NewWriter(os.Stdout)
		for i := range 20_000 {
			fmt.Fprintf(out, "line %d of many\n", i)
		}
		_ = out.Flush()
	case "status":
		text, _ := os.ReadFile("/proc/self/status")
		_, _ = os.Stdout.Write(text)
	case "environment":
		dir, _ := os.Getwd()
		fmt.Println(dir, os.Getenv("A"), os.Getenv("STAGEMESH_LIFELINE")) //nolint:forbidigo // its output is looked at
		rest, err := io.ReadAll(os.Stdin)
		return len(rest) + boolInt(err != nil)
	case "lifeline":
		fd, _ := strconv.Atoi(os.Getenv("STAGEMESH_LIFELINE"))
		printLine("here")
		_, _ = io.ReadAll(os.NewFile(uintptr(fd), "lifeline"))
	case "stubborn":
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
		printLine("here")
		select {}
	case "polite":
		terminated := make(chan os.Signal, 1)
		signal.Notify(terminated, syscall.SIGTERM)
		printLine("here")
		<-terminated
		return 7
	case "parent", "parent that ends":
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), modeVariable+"=stubborn")
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		_ = child.Start()
		printLine(strconv.Itoa(child.Process.Pid))
		if mode == "parent" {
			select {}
		}
	case "host":
		host(args[0])
	}
	return 0
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func printLine(line string) { fmt.Fprintln(os.Stdout, line) }

// host is a host that starts processes and waits for its end.
func host(temp string) {
	s, err := Open(temp)
	if err != nil {
		panic(err)
	}
	for range 4 {
		// From a goroutine whose thread ends at once.
		var started sync.WaitGroup
		started.Go(func() {
			runtime.LockOSThread()
			p, err := s.Start(commandOf("stubborn", nil))
			if err != nil {
				panic(err)
			}
			printLine(strconv.Itoa(p.PID()))
		})
		started.Wait()
	}
	printLine(strings.Repeat("-", 3))
	select {}
}
