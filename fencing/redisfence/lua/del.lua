-- Deletes a value, not its mark, after admit.lua. KEYS[1] mark, KEYS[2] value. ARGV[1] token, ARGV[2] owner or '',
-- ARGV[3] '1' for once, else '0'.
-- Returns what admit returns, or the error of the write; the claim has entered by then.
local mark, err = admit(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
if not mark then return err end
if mark[1] == 0 then return mark end
local n = redis.pcall('DEL', KEYS[2])
return type(n) == 'table' and n or mark
