package main

import (
	"context"
	"io"
)

const helpGeneral = `holdfast looks at locks of package holdfast on Redis, and runs commands under them.

  holdfast ls [PATTERN]               locks that are held
  holdfast inspect KEY                one lock, and who waits for it
  holdfast break KEY --owner VALUE    takes a lock away from its holder
  holdfast run KEY -- COMMAND ...     runs a command while it holds the lock
  holdfast doctor                     is this server fit for locks?
  holdfast watch KEY|PATTERN          shows locks as they change
  holdfast help [COMMAND]             more about each
  holdfast version

` + helpCommon + `
` + helpExit

const helpCommon = `Flags of all commands, before or after the operand:
  --url URL        the server; default $REDIS_URL, else redis://localhost:6379/0.
                   redis://user:password@host:port/db   rediss://...  with TLS
                   redis+sentinel://host:port,host:port/MASTER   rediss+sentinel://...
                     ?sentinel_username= and ?sentinel_password= are for the Sentinels
                   redis+cluster://host:port,host:port  rediss+cluster://...
                   unix://user:password@/path?db=0
                   Again for more servers: run then takes the lock on a majority
                   of them (package redlock), the others ask one after the other.
                   In $REDIS_URL a password is not seen in the list of processes.
  --prefix P       what the services give to WithPrefix; keys are shown without it
  --json           one JSON object per line, with the fields named in the help of a command;
                   times are in ms, a field that has no value is left out
  --timeout D      how long an answer may take; default 5s
Operands that begin with - go behind -- (but for run, where the command is behind it).
Colours are used on a terminal only, and not if NO_COLOR is set.
`

const helpExit = `Exit codes:
  0   fine
  1   it has failed, or doctor has found something bad
  2   wrong usage
  69  the service is unavailable: nothing could be learned
  70  run: the lock was lost
  75  run: the lock was not acquired
  126, 127  run: the command cannot be run, or was not found
  else  run: the exit status of its command, 128+n if signal n has ended it
`

const helpLs = `holdfast ls [PATTERN]

Lists the locks that are held and whose keys match a pattern of Redis ("order:*", quoted for the
shell). Without a pattern it needs --prefix. It goes through all keys of the server by SCAN.

--json: server, key, held, holder, owner, ttl_ms (none: no expiry)
`

const helpInspect = `holdfast inspect KEY

Shows who holds a lock, for how long yet, the latest fencing token, and who waits, the next first,
with the locks that those hold meanwhile. Holders with WithInspect or WithLabels, and those of
"holdfast run" on one server, also tell since when, on which host and by which process.

--json: as ls, with token, since (RFC 3339), host, pid, labels (an object), and waiters: a list of
holder, owner, waits_ms, holds (a list of keys as on the server)
`

const helpBreak = `holdfast break KEY --owner VALUE

Takes a lock away from its holder and gives it to the first who waits. VALUE is the OWNER that
inspect shows, all of it, so that it cannot hit somebody else who has got the lock meanwhile (then:
exit code 1). The holder hears of it with its next renewal, or at once; what it writes until then
only a fencing token can stop.

--json: server, key, owner, broken
`

const helpRun = `holdfast run KEY [flags] -- COMMAND ...

Waits for the lock, runs the command while it holds and renews it, and releases it when the command
has ended (not what that has left running). stdin, stdout and stderr are the command's. SIGINT,
SIGTERM and SIGHUP are passed on to it. Its exit status is returned.

  --ttl D          length of the lease, default 30s: how long the lock stays if this host dies
  --wait D         how long to wait; 0: one try; default: for ever. No lock: exit code 75
  --grace D        see below; default 5s, or a third of the TTL if that is shorter
  --fence          a fencing token with the lock
  --durable        for a majority: its servers forget nothing in a restart
                   (appendonly yes, appendfsync always)
  --longest-ttl D  for a majority: the longest TTL that anybody uses on its servers

The command finds in its environment HOLDFAST_KEY, HOLDFAST_OWNER and, with --fence,
HOLDFAST_TOKEN: for resources that refuse older tokens.

If the lock is lost, the command and all in its process group get SIGTERM, and after the grace
SIGKILL; the exit code is 70. A lock that cannot be renewed is given up that long before its lease
ends, if the grace is at most half of the TTL: then the command has ended before somebody else
can have the lock. (One that was broken or deleted is somebody else's at once.) On Linux the
command also gets SIGTERM if this process is killed.

On a terminal the command is in the foreground, and cannot be suspended by Ctrl-Z.
--json changes nothing.
`

const helpDoctor = `holdfast doctor

Looks at what matters for locks on a server: version, role, memory policy, persistence, replicas,
clock, and whether this user may do what locks do below --prefix. It takes a lock with a name of its
own and gives it back. Exit code 1 if something is bad; a warning is not.

  --fence          what fencing tokens need is then bad where it is missing

--json: server, check, level ("ok", "warning", "bad"), text
`

const helpWatch = `holdfast watch KEY|PATTERN

Shows, until Ctrl-C, who holds the locks, what is left of their leases (the bar: of the most that
was seen), and how many wait. On a terminal it draws a table; else it writes one line for each
change: of the holder, or of the number of those who wait. What begins and ends between two looks
is not seen. It asks for each lock each time: do not watch thousands.

  --every D        time between looks, default 1s

--json: as ls, with time (RFC 3339) and waiters (their number); one line for each change
`

const helpVersion = `holdfast version

--json: version, revision, go, os, arch
`

// help writes the help of a command, or in general.
func (i *invocation) help(c *command) error {
	text := helpGeneral
	if c != nil {
		text = map[string]string{
			"ls": helpLs, "inspect": helpInspect, "break": helpBreak, "run": helpRun, "doctor": helpDoctor,
			"watch": helpWatch, "version": helpVersion,
		}[c.name] + "\n" + helpCommon + "\n" + helpExit
	}
	if c != nil && c.name == "help" {
		text = helpGeneral
	}
	_, err := io.WriteString(i.stdout, text)
	return err
}

// helpFor is the command help.
func helpFor(_ context.Context, i *invocation) error {
	if len(i.operands) == 0 {
		return i.help(nil)
	}
	c := commandOf(i.operands[0])
	if c == nil {
		return usage("help: there is no command %q", i.operands[0])
	}
	return i.help(c)
}
