package keyspace

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// The hash tag examples and the CRC16 of "123456789" (0x31C3) are those of the
// Redis Cluster specification; the other slots are what CLUSTER KEYSLOT answers.
func TestTagAndSlot(t *testing.T) {
	for _, c := range []struct {
		key, tag string
		slot     int
	}{
		{"123456789", "123456789", 12739},
		{"", "", 0},
		{"foo", "foo", 12182},
		{"bar", "bar", 5061},
		{"{user1000}.following", "user1000", 3443},
		{"{user1000}.followers", "user1000", 3443},
		{"user1000", "user1000", 3443},
		{"foo{}{bar}", "foo{}{bar}", 8363},
		{"foo{{bar}}zap", "{bar", 4015},
		{"foo{bar}{zap}", "bar", 5061},
		{"a{b", "a{b", -1},
		{"a}b", "a}b", -1},
		{"}{", "}{", -1},
		{"{}", "{}", -1},
		{"}{x}", "x", -1},
		{"{a}", "a", -1},
		{"{\x00}b", "\x00", 0},
	} {
		t.Run(c.key, func(t *testing.T) {
			require.Equal(t, c.tag, Tag(c.key))
			if c.slot >= 0 {
				require.Equal(t, c.slot, Slot(c.key))
			}
			require.Equal(t, Slot(c.tag), Slot(c.key), "only the tag counts")
		})
	}
}

func TestCompanion(t *testing.T) {
	for _, c := range []struct {
		key, want string
		ok        bool
	}{
		{"order:1", "{order:1}:fence", true},
		{"a{b}c", "a{b}c:fence", true},
		{"{a}", "{a}:fence", true},
		{"{a}{b}", "{a}{b}:fence", true},
		{"a{b", "{a{b}:fence", true},   // wrapped, its tag is "a{b"
		{"{", "{{}:fence", true},       // the tag is "{"
		{"}{x}", "}{x}:fence", true},   // the tag is "x"
		{"{{a}}", "{{a}}:fence", true}, // the tag is "{a"
		{"ключ", "{ключ}:fence", true},
		{"a\x00b", "{a\x00b}:fence", true},
		{"", "", false},
		{"}", "", false},
		{"a}b", "", false},
		{"{}", "", false},
		{"{}a", "", false},
		{"a{}{b}", "", false}, // the first pair is empty, so the whole key counts
	} {
		t.Run(c.key, func(t *testing.T) {
			got, ok := Companion(c.key, "fence")
			require.Equal(t, c.ok, ok)
			require.Equal(t, c.ok, HasCompanions(c.key))
			require.Equal(t, c.want, got)
			all, _ := CompanionsOf(c.key)
			require.Equal(t, c.want, all.Fence)
			if ok {
				require.Equal(t, Slot(c.key), Slot(got))
			}
		})
	}
}

func TestCompanionsOf(t *testing.T) {
	for key, want := range map[string]Companions{
		"order:1":   {"{order:1}:queue", "{order:1}:waiters", "{order:1}:fence"},
		"{order:1}": {"{order:1}:queue{}", "{order:1}:waiters{}", "{order:1}:fence"},
		"a{b}c":     {"a{b}c:queue", "a{b}c:waiters", "a{b}c:fence"},
		"{a}{b}":    {"{a}{b}:queue", "{a}{b}:waiters", "{a}{b}:fence"},
	} {
		got, ok := CompanionsOf(key)
		require.True(t, ok)
		require.Equal(t, want, got)
	}
	_, ok := CompanionsOf("a}b")
	require.False(t, ok)
}

// FuzzCompanionsOf: the companions of two keys are never the same.
func FuzzCompanionsOf(f *testing.F) {
	f.Add("a", "{a}")
	f.Add("{a}", "{a}:")
	f.Add("{a}:queue", "a")
	f.Add("{a}{}", "{a}")
	f.Fuzz(func(t *testing.T, a, b string) {
		ca, ok := CompanionsOf(a)
		if !ok {
			return
		}
		for _, c := range []string{ca.Queue, ca.Waiters} {
			require.Equal(t, Slot(a), Slot(c))
		}
		cb, ok := CompanionsOf(b)
		if !ok || a == b {
			return
		}
		for _, c := range []string{ca.Queue, ca.Waiters} {
			require.NotContains(t, []string{cb.Queue, cb.Waiters}, c)
		}
	})
}

func FuzzCompanion(f *testing.F) {
	for _, key := range []string{"", "order:1", "a{b}c", "a{b", "a}b", "{}", "{}{a}", "{{}}", "}{", "\x00", "{\xff}"} {
		f.Add(key, "fence")
	}
	f.Fuzz(func(t *testing.T, key, suffix string) {
		companion, ok := Companion(key, suffix)
		if !ok {
			if key != "" && !strings.Contains(key, "}") {
				t.Fatalf("%q is refused", key)
			}
			return
		}
		if Slot(companion) != Slot(key) {
			t.Fatalf("%q has slot %d, its companion %q has %d", key, Slot(key), companion, Slot(companion))
		}
		if companion == key || !strings.HasSuffix(companion, ":"+suffix) {
			t.Fatalf("companion of %q: %q", key, companion)
		}
		if n := Slot(key); n < 0 || n >= Slots {
			t.Fatalf("slot of %q: %d", key, n)
		}
	})
}

// FuzzSlot compares the slots of a key and of its companion with those that a real
// server gives them.
func FuzzSlot(f *testing.F) {
	for _, key := range []string{"a", "order:1", "a{b}c", "{}x", "{a", "a}b", "{{a}}", "{a}{b}", "\x00{\xff}", ""} {
		f.Add(key)
	}
	server := redistest.StartCluster(f, 1).Nodes[0].Admin()
	slot := func(t *testing.T, key string) int64 {
		n, err := server.ClusterKeySlot(t.Context(), key).Result()
		require.NoError(t, err)
		return n
	}
	f.Fuzz(func(t *testing.T, key string) {
		require.EqualValues(t, slot(t, key), Slot(key))
		if companion, ok := Companion(key, "fence"); ok {
			require.Equal(t, slot(t, key), slot(t, companion))
		}
	})
}
