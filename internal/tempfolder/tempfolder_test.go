package tempfolder_test

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/tempfolder"
)

const inVariable = "TEMPFOLDER_IN"

// TestMain is also a process that opens a folder, and waits to be killed.
func TestMain(m *testing.M) {
	if in := os.Getenv(inVariable); in != "" {
		f, err := tempfolder.Open(in, "kind-", nil)
		if err == nil {
			err = os.WriteFile(filepath.Join(f.Path, "payload"), []byte("x"), 0o600)
		}
		if err != nil {
			panic(err)
		}
		_, _ = os.Stdout.WriteString(f.Path + "\n")
		_, _ = io.ReadAll(os.Stdin) // until it is killed
		return
	}
	m.Run()
}

func open(t *testing.T, in string, left func(string)) *tempfolder.Folder {
	t.Helper()
	f, err := tempfolder.Open(in, "kind-", left)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Remove() })
	return f
}

func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestFolderOfAKilledProcessIsRemoved(t *testing.T) {
	t.Parallel()
	in := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), inVariable+"="+in)
	out, err := cmd.StdoutPipe()
	if err == nil {
		_, err = cmd.StdinPipe()
	}
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		t.Fatal("it has not begun")
	}
	folder := lines.Text()
	open(t, in, nil)
	if !exists(t, filepath.Join(folder, "payload")) {
		t.Error("the folder of a process that lives is removed")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	other := filepath.Join(in, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	var left []string
	open(t, in, func(path string) { left = append(left, path) })
	if exists(t, folder) || len(left) != 1 || left[0] != folder || !exists(t, other) {
		t.Errorf("removed are %q", left)
	}
}

func TestFolderIsKeptFromCleaners(t *testing.T) {
	t.Parallel()
	in := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		f, err := tempfolder.Open(in, "kind-", nil)
		if err != nil {
			t.Fatal(err)
		}
		lock := filepath.Join(f.Path, "host.lock")
		for range 2 {
			<-time.After(20 * time.Minute)
			if err := os.RemoveAll(f.Path); err != nil {
				t.Fatal(err)
			}
			<-time.After(time.Hour)
			if info, err := os.Stat(lock); err != nil || time.Since(info.ModTime()) > time.Hour {
				t.Errorf("the lock is %v, %v", info, err)
			}
		}
		if err := f.Remove(); err != nil {
			t.Error(err)
		}
		<-time.After(2 * time.Hour)
		if exists(t, f.Path) {
			t.Error("it is there after its removal")
		}
	})
}

func TestFolderIsPrivateAndRestored(t *testing.T) {
	t.Parallel()
	f := open(t, t.TempDir(), nil)
	for range 2 {
		if info, err := os.Stat(f.Path); err != nil || info.Mode().Perm() != 0o700 {
			t.Fatalf("%v, %v", info, err)
		}
		if err := os.RemoveAll(f.Path); err != nil {
			t.Fatal(err)
		}
		if err := f.Restore(); err != nil {
			t.Fatal(err)
		}
	}
	open(t, filepath.Dir(f.Path), nil)
	if !exists(t, f.Path) {
		t.Error("a restored folder is removed")
	}
	if err := f.Remove(); err != nil || exists(t, f.Path) {
		t.Errorf("it is still there, %v", err)
	}
}
