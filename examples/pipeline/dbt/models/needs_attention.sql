-- committed and rolled-back are fine; a later run replaces in-doubt and not-archived
select
    concat_ws(':', format_id, lower(hex(gtrid))) as xid,
    verdict,
    findings,
    since,
    last_at,
    rms,
    owners,
    decision,
    tm
from {{ source('dtx_pipeline', 'verdicts') }}
where verdict not in ('committed', 'rolled-back', 'in-doubt', 'not-archived')
