/* The work queue's protocol over a shared log: what is modelled and how to run it is in README.md.
 *
 * Every instance folds the log at its own pace into fold[i]. fold[TRUTH] is the fold of the whole log; it moves with the very
 * step that appends, and only the assertions look at it. A place in the log is an LSN; a delivery is named by the LSN of its
 * Pop. Each -DNO_... switches one safeguard off, and then there is an error.
 */
#define N 20                  /* places in the log: more than any run needs (asserted) */
#ifndef LAG
#define LAG 2                 /* records in the log before the slowest instance has read the first of them */
#endif
#define INSTANCES 2
#ifndef PRODUCERS
#define PRODUCERS 2           /* each pushes one message */
#endif
#ifndef REPEATS
#define REPEATS 0             /* records that get into the log twice */
#endif
#ifndef REQUEUES
#define REQUEUES 0            /* leases that run out early */
#endif
#ifndef CRASHES
#define CRASHES 0             /* 0 or 1 */
#endif
#define TRUTH 2
#define MESSAGES PRODUCERS
#define SLOTS (MESSAGES + 1)  /* the last one is a second task for a message, if a fold makes one */
#define LINE 6                /* Pops in line: more than any run needs (asserted) */
#define NONE 255

mtype = { PUSH, POP, COMPLETE, REQUEUE, DEAD };
mtype = { IDLE, ASKING, WAITING, WORKING, ACKING };

#define ABSENT 0              /* where a task is */
#define READY 1
#define LEASED 2
#define DONE 3

typedef Record { mtype kind; byte a; byte b }  /* PUSH message; POP life, nonce; COMPLETE and REQUEUE delivery; DEAD life */
typedef Fold { byte at; byte st[SLOTS]; byte by[SLOTS]; byte rank[SLOTS]; byte line[LINE]; byte waiting }

Record log[N];
byte size;
Fold fold[INSTANCES + 1];
byte pushed_at[SLOTS];
byte life[INSTANCES];         /* an instance's name; 0: it is down */
byte ended, told;             /* lives that are over, and those the log says are over: a bit each */
byte repeats, requeues, crashes, deaths;    /* what may still happen */

hidden byte was[SLOTS], held[SLOTS];        /* the fold before the record at hand */
hidden byte s, r, k, best, copies;
hidden byte seen, stale;

#define gone(x) ((ended >> (x)) & 1)
#define said(x) ((told >> (x)) & 1)
#define at(i) (life[i] == 0 -> size : fold[i].at)
#define room (size - (at(0) < at(1) -> at(0) : at(1)) < LAG)

/* --- the fold: what the record at `l` does to fold `f` ----------------------------------------------------------------- */

inline out_of_line(f, place) {
    for (r : place .. LINE - 2) { fold[f].line[r] = fold[f].line[r + 1] }
    fold[f].line[LINE - 1] = 0;
    fold[f].waiting--
}

inline serve(f) {             /* the best ready task to the first Pop in line, while there are both */
    do
    :: fold[f].waiting == 0 -> break
    :: else ->
        best = NONE;
        for (s : 0 .. SLOTS - 1) {
            if
            :: fold[f].st[s] == READY && (best == NONE || fold[f].rank[s] < fold[f].rank[best]) -> best = s
            :: else
            fi
        }
        if
        :: best == NONE -> break
        :: else -> fold[f].st[best] = LEASED; fold[f].by[best] = fold[f].line[0]; out_of_line(f, 0)
        fi
    od
}

inline give_back(f, l, slot) {
    fold[f].st[slot] = READY;
    fold[f].by[slot] = 0;
#ifdef NO_ORDER
    fold[f].rank[slot] = l
#endif
}

inline find(f, delivery) {    /* best: the task in this delivery */
    best = NONE;
    for (s : 0 .. SLOTS - 1) {
        if
#ifdef NO_DELIVERY_NAMES
        :: fold[f].st[s] == LEASED && s == delivery -> best = s
#else
        :: fold[f].st[s] == LEASED && fold[f].by[s] == delivery -> best = s
#endif
        :: else
        fi
    }
}

inline apply(f, l) {
    seen = false;
    for (k : 0 .. N - 1) {
        if
        :: k < l && log[k].kind == log[l].kind && log[k].a == log[l].a && log[k].b == log[l].b -> seen = true
        :: else
        fi
    }
    if
    :: log[l].kind == PUSH ->
        best = log[l].a;
#ifdef NO_PUSH_NUMBERS
        if :: seen -> best = MESSAGES; seen = false :: else fi;
#endif
        if
        :: !seen -> fold[f].st[best] = READY; fold[f].rank[best] = l; pushed_at[best] = l; serve(f)
        :: else
        fi
    :: log[l].kind == POP ->
#ifdef NO_POP_NUMBERS
        seen = false;
#endif
        if
        :: !seen -> assert(fold[f].waiting < LINE); fold[f].line[fold[f].waiting] = l; fold[f].waiting++; serve(f)
        :: else
        fi
    :: log[l].kind == COMPLETE ->
        find(f, log[l].a);
        if
        :: best != NONE -> fold[f].st[best] = DONE; fold[f].by[best] = 0
        :: else
        fi
    :: log[l].kind == REQUEUE ->
        find(f, log[l].a);
        if
        :: best != NONE ->
            give_back(f, l, best);
#ifndef NO_HAND_OVER
            serve(f)
#endif
        :: else
        fi
    :: log[l].kind == DEAD ->
#ifndef NO_DEATHS
        for (k : 0 .. LINE - 1) {
            if
            :: fold[f].waiting > LINE - 1 - k && log[fold[f].line[LINE - 1 - k]].a == log[l].a -> out_of_line(f, LINE - 1 - k)
            :: else
            fi
        }
        for (s : 0 .. SLOTS - 1) {
            if
            :: fold[f].st[s] == LEASED && log[fold[f].by[s]].a == log[l].a -> give_back(f, l, s)
            :: else
            fi
        }
        serve(f)
#else
        skip
#endif
    fi;
    fold[f].at = l + 1
}

/* --- the log, and what has to be true of every record in it ------------------------------------------------------------ */

inline note(f) { for (s : 0 .. SLOTS - 1) { was[s] = fold[f].st[s]; held[s] = fold[f].by[s] } }

inline promises(the_task, the_delivery) {
    assert(fold[TRUTH].st[MESSAGES] == ABSENT);                                         /* I1: a message is one task */
    for (s : 0 .. SLOTS - 1) {
        assert(!(fold[TRUTH].st[s] == READY && fold[TRUTH].waiting > 0));               /* I4 */
        assert(!(was[s] != ABSENT && fold[TRUTH].st[s] == ABSENT));                     /* I1: none is lost */
        assert(!(was[s] == DONE && fold[TRUTH].st[s] != DONE));                         /* I2: none comes back */
        for (r : 0 .. SLOTS - 1) {
            if
            :: r != s && fold[TRUTH].st[s] == LEASED && fold[TRUTH].st[r] == LEASED ->  /* I3: a Pop has one task */
                k = fold[TRUTH].by[s]; best = fold[TRUTH].by[r];
                assert(!(log[k].a == log[best].a && log[k].b == log[best].b))
            :: r != s && fold[TRUTH].st[s] == LEASED && (was[s] != LEASED || held[s] != fold[TRUTH].by[s]) ->
                assert(!(fold[TRUTH].st[r] == READY && pushed_at[r] < pushed_at[s]))    /* I7: an older one goes first */
            :: else
            fi
        }
        assert(!(fold[TRUTH].st[s] == LEASED && said(log[fold[TRUTH].by[s]].a)))        /* the dead hold nothing */
    }
    if
    :: the_task != NONE ->                                              /* I2, I6: about an older delivery, it changes nothing */
        stale = was[the_task] != LEASED || held[the_task] != the_delivery;
        assert(!stale || (fold[TRUTH].st[the_task] == was[the_task] && fold[TRUTH].by[the_task] == held[the_task]))
    :: else
    fi
}

inline append(what, x, y, its_task, its_delivery) {
    assert(size < N);
    note(TRUTH);
    log[size].kind = what; log[size].a = x; log[size].b = y;
    apply(TRUTH, size);
    promises(its_task, its_delivery);
    size++
}

#ifdef NO_DELIVERY_NAMES
#define name_of(x, y) x
#else
#define name_of(x, y) y
#endif

/* --- who writes -------------------------------------------------------------------------------------------------------- */

proctype Producer(byte message) {
    d_step { room -> append(PUSH, message, 0, NONE, NONE) }
    if
    :: d_step { room && repeats > 0 -> repeats--; append(PUSH, message, 0, NONE, NONE) }   /* outcome unknown: once more */
    :: skip
    fi
}

#define holder(i, slot) log[fold[i].by[slot]].a
#define leased(i, slot) (life[i] != 0 && room && fold[i].st[slot] == LEASED)

proctype Monitor(byte i; byte slot) {
    byte by, until;           /* it ends a delivery once: `by` was ended at `until`, which it has not read yet */
end:
    do
    :: d_step { leased(i, slot) && fold[i].at >= until && (gone(holder(i, slot)) || requeues > 0) ->
           if :: gone(holder(i, slot)) :: else -> requeues-- fi;
           by = fold[i].by[slot];
           append(REQUEUE, name_of(slot, by), 10 + size, slot, by);
           until = size; by = 0 }
    od
}

proctype Instance(byte i) {
    mtype status = IDLE;
    byte nonce, lsn, slot, acked;
end:
    do
    :: d_step { life[i] != 0 && fold[i].at < size ->                                     /* the next record */
           note(i);
           lsn = fold[i].at;
           apply(i, lsn);
           lsn = 0;
           if
#ifdef NO_NONCES
           :: status == WAITING ->
#else
           :: status == WAITING || status == ASKING ->
#endif
               for (s : 0 .. SLOTS - 1) {
                   if
                   :: fold[i].st[s] == LEASED && (was[s] != LEASED || held[s] != fold[i].by[s]) &&
                      log[fold[i].by[s]].a == life[i] && log[fold[i].by[s]].b == nonce ->
                       slot = s; acked = fold[i].by[s]; status = WORKING
                   :: else
                   fi
               }
           :: status == ACKING && fold[i].at > acked -> status = IDLE; slot = 0; acked = 0
           :: else
           fi;
           s = 0 }
    :: d_step { life[i] != 0 && status == IDLE && room ->
           nonce++; status = ASKING; append(POP, life[i], nonce, NONE, NONE) }
    :: status == ASKING -> status = WAITING                                             /* the append returns */
    :: d_step { life[i] != 0 && status != IDLE && repeats > 0 && room -> repeats--; append(POP, life[i], nonce, NONE, NONE) }
    :: d_step { life[i] != 0 && status == WORKING && room ->                            /* acked: first the delivery */
           append(COMPLETE, name_of(slot, acked), 100 + i, slot, acked);
           acked = size - 1; status = ACKING }
    :: d_step { life[i] != 0 && crashes > 0 ->
           crashes--; ended = ended | (1 << life[i]);
           life[i] = 0; status = IDLE; nonce = 0; slot = 0; acked = 0;
           fold[i].at = 0; fold[i].waiting = 0;
           for (s : 0 .. SLOTS - 1) { fold[i].st[s] = 0; fold[i].by[s] = 0; fold[i].rank[s] = 0 }
           for (r : 0 .. LINE - 1) { fold[i].line[r] = 0 }
           s = 0 }
    :: d_step { life[i] == 0 ->                   /* under a new name; what the other has read is in a snapshot, or all is */
           lsn = (life[1 - i] == 0 -> size : fold[1 - i].at);
           do :: fold[i].at < lsn -> best = fold[i].at; acked = best; apply(i, acked) :: else -> break od;
           acked = 0; lsn = 0; life[i] = i + 1 + INSTANCES }
    :: d_step { life[i] != 0 && room && deaths > 0 && (ended & ~told) != 0 ->           /* the dead are told of */
           deaths--; lsn = 1;
           do :: !(gone(lsn) && !said(lsn)) -> lsn++ :: else -> break od;
           told = told | (1 << lsn); append(DEAD, lsn, 0, NONE, NONE); lsn = 0 }
    od
}

proctype Checker() {          /* L1, L2: when nothing can happen any more, everything is done and everybody waits for more */
    d_step {
        timeout ->
        for (s : 0 .. MESSAGES - 1) { assert(fold[TRUTH].st[s] == DONE) }
        assert(fold[TRUTH].waiting >= INSTANCES)
    }
}

init {
    byte message;
    atomic {
        if :: repeats = REPEATS :: REPEATS > 0 -> repeats = 0 fi;
        if :: requeues = REQUEUES :: REQUEUES > 0 -> requeues = 0 fi;
        if :: CRASHES > 0 -> crashes = 1; deaths = 1 :: CRASHES > 0 -> crashes = 1 :: skip fi;
        life[0] = 1; life[1] = 2;
        for (message : 0 .. MESSAGES - 1) { run Producer(message); run Monitor(0, message); run Monitor(1, message) }
        run Instance(0); run Instance(1);
        run Checker()
    }
}
