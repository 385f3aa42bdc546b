-- Sets a value, after admit.lua. KEYS[1] mark, KEYS[2] value. ARGV[1] token, ARGV[2] owner or '', ARGV[3] '1' for once,
-- else '0'. ARGV[4] value, ARGV[5] its TTL in ms, '0' for none, '-1' to keep what there is.
-- Returns what admit returns, or the error of the write; the claim has entered by then.
local mark, err = admit(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
if not mark then return err end
if mark[1] == 0 then return mark end
local set
if ARGV[5] == '0' then
  set = redis.pcall('SET', KEYS[2], ARGV[4])
elseif ARGV[5] == '-1' then
  set = redis.pcall('SET', KEYS[2], ARGV[4], 'KEEPTTL')
else
  set = redis.pcall('SET', KEYS[2], ARGV[4], 'PX', ARGV[5])
end
return set.err and set or mark
